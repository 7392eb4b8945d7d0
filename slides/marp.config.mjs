import { readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const build = join(dirname(fileURLToPath(import.meta.url)), "build");

/** Pictures go into the page itself. (Markdown does not allow an SVG as an image's address, so this comes after it.) */
const picturesInside = (markdown) =>
  markdown.core.ruler.push("pictures_inside", (state) => {
    for (const image of state.tokens.flatMap((block) => block.children ?? []).filter(({ type }) => type === "image")) {
      const path = image.attrGet("src");
      if (!path.startsWith("figures/")) continue;
      image.attrSet("src", `data:image/svg+xml;base64,${readFileSync(join(build, path)).toString("base64")}`);
    }
  });

export default {
  html: false,
  browserTimeout: 120,
  // Nothing may be fetched: MathJax draws into the page (KaTeX's fonts, and emoji, come from a CDN).
  options: { math: "mathjax", emoji: { shortcode: false, unicode: false } },
  engine: ({ marp }) => marp.use(picturesInside),
};
