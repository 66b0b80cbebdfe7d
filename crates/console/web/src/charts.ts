// Charts over time, drawn by uPlot, in the colours of the page.

import uPlot from "uplot";
import { h } from "./dom";
import { clock } from "./format";
import type { Sample } from "./model";

export interface Line {
  label: string;
  /** The name of a CSS variable. */
  colour: string;
  dash?: number[];
  fill?: boolean;
}

export interface Chart {
  element: HTMLElement;
  /** Draws new data: times in seconds, and the values of each line. */
  set(at: number[], values: Sample[][]): void;
  close(): void;
}

const dark = window.matchMedia("(prefers-color-scheme: dark)");

function colour(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** A chart. The title is what screen readers get instead. */
export function createChart(title: string, lines: Line[], format: (value: number) => string, height = 190): Chart {
  const element = h("div", { class: "chart", role: "img", "aria-label": title });
  let data: uPlot.AlignedData = [[], ...lines.map(() => [])];
  let plot: uPlot | null = null;

  const create = () => {
    plot?.destroy();
    plot = new uPlot(
      {
        width: Math.max(200, element.clientWidth),
        height,
        cursor: { drag: { x: false, y: false } },
        legend: { live: true },
        scales: { y: { range: (_, __, max) => [0, Number.isFinite(max) && max > 0 ? max * 1.1 : 1] } },
        axes: [
          {
            stroke: colour("--muted"),
            grid: { stroke: colour("--grid"), width: 1 },
            ticks: { show: false },
            space: 80,
            // The labels have no fractions of a second.
            incrs: [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400],
            size: 32,
            values: (_, splits, __, ___, step) => splits.map((at) => clock(at, step < 60)),
          },
          {
            stroke: colour("--muted"),
            grid: { stroke: colour("--grid"), width: 1 },
            ticks: { show: false },
            size: 64,
            values: (_, splits) => splits.map(format),
          },
        ],
        series: [
          { label: "Time", value: (_, at) => (at == null ? "–" : clock(at)) },
          ...lines.map((line) => ({
            label: line.label,
            stroke: colour(line.colour),
            width: 2,
            dash: line.dash,
            fill: line.fill ? `${colour(line.colour)}22` : undefined,
            points: { show: false },
            value: (_: uPlot, value: number | null) => (value == null ? "–" : format(value)),
          })),
        ],
      },
      data,
      element,
    );
  };

  const resized = new ResizeObserver(() => {
    const width = Math.max(200, element.clientWidth);
    if (plot && plot.width !== width) {
      plot.setSize({ width, height });
    } else if (!plot && element.clientWidth > 0) {
      create();
    }
  });
  resized.observe(element);
  dark.addEventListener("change", create);
  return {
    element,
    set(at, values) {
      data = [at, ...values];
      plot?.setData(data);
    },
    close() {
      resized.disconnect();
      dark.removeEventListener("change", create);
      plot?.destroy();
    },
  };
}
