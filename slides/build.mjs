// build/NAME.md, which assemble.py wrote, -> build/NAME.html and build/NAME.pdf: one file each, nothing to fetch.

import { readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { marpCli } from "@marp-team/marp-cli";
import { findBrowser } from "./browser.mjs";

const here = dirname(fileURLToPath(import.meta.url));
const build = join(here, "build");
const browser = findBrowser();

// The theme with its fonts inside it, so that lines break where they broke when the slides were looked at.
const { resolve } = createRequire(import.meta.url);
const theme = readFileSync(join(here, "theme.css"), "utf8").replace(
  /url\("(@fontsource\/[^"]+)"\)/g,
  (_, font) => `url("data:font/woff2;base64,${readFileSync(resolve(font)).toString("base64")}")`,
);
writeFileSync(join(build, "theme.css"), theme);

const named = (kind) => readdirSync(build).filter((file) => file.endsWith(kind)).map((file) => join(build, file));
for (const old of [...named(".html"), ...named(".pdf")]) rmSync(old);
const common = ["--config", join(here, "marp.config.mjs"), "--theme", join(build, "theme.css")];
const pdf = ["--pdf", "--pdf-notes", "--pdf-outlines", "--browser-path", browser];
for (const extra of [[], pdf]) {
  const status = await marpCli([...named(".md"), ...common, ...extra]);
  if (status !== 0) process.exit(status);
}
