// Where an installed Chrome or Chromium is. It makes the PDF, and looks at the slides.

import { accessSync, constants } from "node:fs";
import { delimiter, join } from "node:path";

const NAMES = ["google-chrome-stable", "google-chrome", "chromium", "chromium-browser", "chrome", "microsoft-edge"];
const PLACES = [
  "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
  "/Applications/Chromium.app/Contents/MacOS/Chromium",
  "C:\\Program Files\\Google\\Chrome\\Application\\chrome.exe",
  "C:\\Program Files (x86)\\Google\\Chrome\\Application\\chrome.exe",
  "C:\\Program Files (x86)\\Microsoft\\Edge\\Application\\msedge.exe",
];

const canRun = (path) => {
  try {
    accessSync(path, constants.X_OK);
    return true;
  } catch {
    return false;
  }
};

/** The path after --browser, or the first one that is installed; ends the process with a word if there is none. */
export function findBrowser(words = process.argv) {
  const at = words.indexOf("--browser");
  const folders = (process.env.PATH ?? "").split(delimiter);
  const candidates =
    at >= 0 ? [words[at + 1] ?? ""] : [...NAMES.flatMap((name) => folders.map((f) => join(f, name))), ...PLACES];
  const found = candidates.find(canRun);
  if (found) return found;
  console.error(
    at >= 0
      ? `${candidates[0]} cannot be run: name the program of a Chrome or Chromium after --browser`
      : "No Chrome or Chromium is installed, and PDF is made by one: install it " +
          "(Debian, Ubuntu: apt install chromium), or say where it is: make slides BROWSER=/path/to/chrome",
  );
  process.exit(1);
}
