// Open every built deck in a browser, without a network, and look at each slide as the back row does.
//
//     node check.mjs [--pictures FOLDER] [--browser PATH] [--decks FOLDER]
//
// A slide fails if something is fetched, lies outside the slide or on its footer, is wider than its box, is an image
// that does not load, is too small to read, or if it has no notes in the presenter's view.

import { existsSync, mkdirSync, readdirSync, statSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath, pathToFileURL } from "node:url";
import { chromium } from "playwright-core";
import { findBrowser } from "./browser.mjs";

const SMALLEST_PX = { text: 24, code: 18, footer: 14 }; // on a slide of 1280 x 720

const option = (name, otherwise) => {
  const at = process.argv.indexOf(name);
  return at < 0 ? otherwise : process.argv[at + 1];
};
const build = option("--decks", join(dirname(fileURLToPath(import.meta.url)), "build"));
const pictures = option("--pictures");
if (pictures) mkdirSync(pictures, { recursive: true });

const names = existsSync(build) ? readdirSync(build).filter((file) => file.endsWith(".html")) : [];
if (!names.length) {
  console.error(`${build} has no decks: build them first`);
  process.exit(1);
}

/** In the page: what is wrong with the slide that is shown, in words. */
function look(smallest) {
  const wrong = [];
  const section = document.querySelector("svg.bespoke-marp-active section");
  if (!section) return ["no slide is shown"];
  const slide = section.getBoundingClientRect();
  const scale = slide.width / 1280;
  const px = (length) => Math.round(length / scale);
  const words = (node) => `"${node.textContent.trim().replace(/\s+/g, " ").slice(0, 40)}"`;
  const footer = section.querySelector("footer");
  const floor = footer ? footer.getBoundingClientRect().top : slide.bottom - 44 * scale;
  const parts = [...section.querySelectorAll("h1, h2, p, li, table, pre, blockquote, img, mjx-container, footer")];
  for (const part of parts) {
    const box = part.getBoundingClientRect();
    const what = `${part.tagName.toLowerCase()} ${words(part)}`;
    const over = Math.max(slide.left + 40 * scale - box.left, box.right - (slide.right - 40 * scale));
    if (over > scale) wrong.push(`${what} comes ${px(over)} pixels too near to the side`);
    if (box.top < slide.top) wrong.push(`${what} begins above the slide`);
    if (part !== footer && box.bottom > floor + scale) wrong.push(`${what} ends ${px(box.bottom - floor)} pixels too low`);
    if (part.scrollWidth > part.clientWidth + 1 && part.clientWidth > 0 && part.tagName !== "IMG")
      wrong.push(`${what} is wider than its box by ${part.scrollWidth - part.clientWidth}`);
    if (part.tagName === "IMG" && !(part.complete && part.naturalWidth > 0)) wrong.push(`${what} did not load`);
  }
  if (footer && footer.getBoundingClientRect().bottom > slide.bottom - 8 * scale) wrong.push("the footer leaves the slide");
  const walk = document.createTreeWalker(section, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const text = walk.currentNode;
    const parent = text.parentElement;
    if (!text.textContent.trim() || parent.closest("mjx-assistive-mml, style, script")) continue;
    const size = parseFloat(getComputedStyle(parent).fontSize);
    const kind = parent.closest("footer") ? "footer" : parent.closest("code") ? "code" : "text";
    if (size < smallest[kind]) wrong.push(`${words(parent)} has ${size} pixels; ${kind} needs ${smallest[kind]}`);
  }
  return [...new Set(wrong)];
}

const browser = await chromium.launch({ executablePath: findBrowser(), args: ["--disable-gpu"] });
const wrong = [];
let looked = 0;
for (const name of names) {
  const page = await browser.newPage({ viewport: { width: 1280, height: 720 } });
  await page.context().setOffline(true);
  const file = pathToFileURL(join(build, name)).href;
  page.on("request", (request) => {
    const url = request.url();
    if (!url.startsWith("data:") && !url.startsWith("blob:") && url.split(/[?#]/)[0] !== file)
      wrong.push(`${name}: fetches ${url.slice(0, 90)}`);
  });
  page.on("pageerror", (error) => wrong.push(`${name}: ${error.message}`));
  await page.goto(file);
  await page.evaluate(() => document.fonts.ready);
  await page.addStyleTag({ content: ".bespoke-marp-osc { visibility: hidden !important }" }); // Marp's buttons, which fade in a show
  const total = await page.locator("svg[data-marpit-svg]").count();
  for (let place = 1; place <= total; place++) {
    await page.evaluate((at) => (location.hash = `#${at}`), place);
    await page.waitForFunction(
      (at) => document.querySelectorAll("svg[data-marpit-svg]")[at - 1].classList.contains("bespoke-marp-active"),
      place,
    );
    const notes = await page.evaluate(
      (at) => document.querySelector(`.bespoke-marp-note[data-index="${at - 1}"]`)?.textContent.trim(),
      place,
    );
    if (!notes) wrong.push(`${name}, slide ${place}: no notes in the presenter's view`);
    for (const found of await page.evaluate(look, SMALLEST_PX)) wrong.push(`${name}, slide ${place}: ${found}`);
    if (pictures)
      await page.screenshot({ path: join(pictures, `${name.replace(".html", "")}-${String(place).padStart(2, "0")}.png`) });
    looked += 1;
  }
  const pdf = join(build, name.replace(".html", ".pdf"));
  if (!existsSync(pdf) || statSync(pdf).size < 10_000) wrong.push(`${name}: no PDF beside it`);
  await page.close();
}
await browser.close();
for (const line of wrong) console.error(line);
console.log(`${looked} slides of ${names.length} decks looked at, ${wrong.length} things wrong`);
process.exit(wrong.length ? 1 : 0);
