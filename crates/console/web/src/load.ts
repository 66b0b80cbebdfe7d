// The chart of the load: what was measured, and the forecast ahead.

import { createChart, type Chart } from "./charts";
import { h, reconcile, setText } from "./dom";
import { parseTime, short, time } from "./format";
import type { Page } from "./map";
import type { ForecastRow, History, Model, Sample } from "./model";

/** Merges measured values and a forecast on one time axis. */
export function merge(
  history: History,
  measured: Sample[][],
  forecast: ForecastRow[],
): { at: number[]; values: Sample[][] } {
  const start = history.at[0] ?? 0;
  const points = new Map<number, Sample[]>();
  const width = measured.length + 1;
  const point = (at: number) => {
    let values = points.get(at);
    if (!values) {
      // A line continues across the times of the other lines.
      values = Array<Sample>(width).fill(undefined);
      points.set(at, values);
    }
    return values;
  };
  history.at.forEach((at, index) => {
    const values = point(at);
    measured.forEach((column, line) => (values[line] = column[index]));
  });
  for (const row of forecast) {
    const at = parseTime(row.at) / 1000;
    if (row.load !== null && at < start) {
      point(at)[0] = row.load;
    }
    if (row.forecast !== null) {
      point(at)[width - 1] = row.forecast;
    }
  }
  const at = [...points.keys()].sort((a, b) => a - b);
  const values = Array.from({ length: width }, (_, line) => at.map((time) => points.get(time)?.[line]));
  return { at, values };
}

/** The newest forecast of a series. */
export function newest(forecast: ForecastRow[], series: string, name: string | null): ForecastRow[] {
  return forecast.filter((row) => row.series === series && (name === null || row.name === name));
}

export function createLoad(model: Model): Page {
  const select = h("select", { id: "load-series", onchange: () => rebuild() });
  const place = h("div", {});
  const summary = h("p", { class: "note", id: "load-summary" });
  const element = h(
    "section",
    { class: "panel wide", "aria-labelledby": "load-title" },
    h(
      "div",
      { class: "head" },
      h("h2", { id: "load-title" }, "Load and forecast"),
      h("label", { class: "inline", for: "load-series" }, "Of "),
      select,
    ),
    place,
    summary,
  );
  let chart: Chart | null = null;

  const rebuild = () => {
    chart?.close();
    chart = createChart(
      "CPUs in use over time, and the forecast. The text below has the newest values.",
      [
        { label: "CPUs in use", colour: "--line-1", fill: true },
        { label: "Capacity", colour: "--line-3", dash: [2, 4] },
        { label: "Forecast", colour: "--line-2", dash: [6, 4] },
      ],
      short,
    );
    place.replaceChildren(chart.element);
    update();
  };

  const update = () => {
    const names = ["", ...model.allNodes().map((node) => node.name)];
    reconcile(
      select,
      names,
      (name) => name,
      (name) => h("option", { value: name }, name === "" ? "the cluster" : name),
      () => undefined,
    );
    const node = select.value;
    const { values } = model.history;
    const measured = values[node === "" ? "cluster" : `node ${node}`] ?? [];
    const last = measured.at(-1);
    const capacityNow = node === "" ? values["capacity"]?.at(-1) : model.nodeLoad.get(node)?.capacity;
    const capacity = node === "" ? (values["capacity"] ?? []) : [];
    const forecast = node === "" ? newest(model.forecast, "cluster", null) : newest(model.forecast, "node", node);
    const merged = merge(model.history, [measured, capacity], forecast);
    // Before this page was opened, and ahead, the capacity is taken to be that of now.
    merged.values[1] = (merged.values[1] ?? []).map((value) => value ?? capacityNow ?? null);
    chart?.set(merged.at, merged.values);
    const ahead = forecast.filter((row) => row.forecast !== null && parseTime(row.at) > Date.now());
    const peak = ahead.reduce<ForecastRow | null>(
      (most, row) => (most === null || (row.forecast ?? 0) > (most.forecast ?? 0) ? row : most),
      null,
    );
    const now = last === undefined || last === null ? "No load report yet." : `Now ${short(last)} of ${short(capacityNow)} CPUs.`;
    const predicted = peak
      ? ` Highest forecast: ${short(peak.forecast)} at ${time(peak.at)} (${peak.method}).`
      : " No forecast: the chart shows what this page has seen.";
    setText(summary, model.has("node_load") ? now + predicted : "Loading…");
  };
  rebuild();
  return { element, update, close: () => chart?.close() };
}
