// Bundles the page into dist/, whose files the Rust crate embeds.
import { copyFile } from "node:fs/promises";
import { build } from "esbuild";

await build({
  entryPoints: { app: "src/main.ts", style: "src/style.css" },
  outdir: "dist",
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  // The licence of uPlot must stay in the file.
  legalComments: "eof",
});
for (const file of ["index.html", "icon.svg"]) {
  await copyFile(`src/${file}`, `dist/${file}`);
}
