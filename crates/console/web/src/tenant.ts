// The page of one tenant.

import { get, rows, type Table } from "./api";
import { createChart } from "./charts";
import { confirm, errorText, moveDialog, restoreDialog, type Target } from "./dialogs";
import { fill, focusHeading, h, reconcile, setAttribute, setText } from "./dom";
import { bytes, milliseconds, percent, short, time } from "./format";
import { createEvents, createMoves, createStatements, setEmpty } from "./lists";
import { merge } from "./load";
import { describe, type Page } from "./map";
import { LEVELS, level, type ForecastRow, type History, type Model, type StatementRow, type TopStatementRow } from "./model";
import { combine } from "./pages";

/** A part that could not be read has an error instead of rows. */
type Part = Table | { error: { message: string } } | null;

interface Details {
  /** Sent with each action, because the name may be given to another database. */
  partition: number | null;
  limits: Part;
  stats: Part;
  latencies: Part;
  statements: Part;
  top_statements?: Part;
  hot_keys?: Part;
  /** Not read each time. */
  history?: Part;
  forecast?: Part;
}

const INTERVAL_MS = 5000;
/** Restore points are listed from the object store. */
const HISTORY_INTERVAL_MS = 60_000;
/** The controller lists this many pinned tenants. */
const MAX_LISTED = 100;

function table(part: Part | undefined): Table | null {
  return part && "rows" in part ? part : null;
}

function problem(part: Part | undefined): string {
  return part && "error" in part ? part.error.message : "";
}

export function tenantPage(model: Model, name: string): Page {
  let details: Details | null = null;
  let failure = "";
  let timer = 0;
  let historyDue = 0;
  const closing = new AbortController();
  const target = (): Target => ({ database: name, partition: details?.partition ?? undefined });

  const parts = [
    summaryPart(model, target, () => failure),
    chartPart(model, name, () => rows<ForecastRow>(table(details?.forecast))),
    latencyPart(() => details),
    topStatementsPart(() => details),
    createMoves(model, name, 5),
    createStatements({
      statements: () => rows<StatementRow>(table(details?.statements)),
      isLoaded: () => details !== null,
      node: () => model.tenant(name)?.node ?? "",
      note: () => problem(details?.statements),
    }),
    limitsPart(() => details),
    hotKeysPart(() => details),
    restorePart(target, () => details),
    createEvents(model, name, 20, false),
  ];
  const page = combine(`Tenant ${name}`, parts, "columns");

  const load = async () => {
    const isHistoryDue = Date.now() >= historyDue;
    let wait = INTERVAL_MS;
    try {
      const path = `tenants/${encodeURIComponent(name)}${isHistoryDue ? "" : "?history=false"}`;
      const loaded = await get<Details>(path, closing.signal);
      failure = "";
      if (isHistoryDue) {
        historyDue = Date.now() + HISTORY_INTERVAL_MS;
      } else if (loaded.partition === details?.partition) {
        loaded.history = details?.history;
      } else {
        // The restore points of another database must not be shown.
        historyDue = wait = 0;
      }
      details = loaded;
    } catch (error) {
      failure = errorText(error);
    } finally {
      if (!closing.signal.aborted) {
        timer = window.setTimeout(() => void load(), wait);
        page.update();
      }
    }
  };
  void load();
  return {
    ...page,
    close: () => {
      closing.abort();
      window.clearTimeout(timer);
      page.close?.();
    },
  };
}

/** The name, the figures and the actions. */
function summaryPart(model: Model, target: () => Target, failure: () => string): Page {
  const name = target().database;
  const node = h("span", {});
  const status = h("span", { class: "status" });
  const figures = h("dl", { class: "facts figures" });
  const alert = h("p", { class: "problem", role: "alert" });
  const isPinned = () => model.listed("pinned").includes(name);
  const move = h(
    "button",
    {
      class: "primary",
      id: "move",
      onclick: () => {
        const from = model.tenant(name)?.node ?? "";
        const nodes = model.nodes.filter((node) => node.state === "alive" && node.name !== from);
        moveDialog(target(), from, nodes.map((node) => node.name));
      },
    },
    "Move…",
  );
  const pin = (pinned: boolean) =>
    h(
      "button",
      {
        onclick: () => {
          const shown = target();
          confirm({
            title: pinned ? `Pin ${name}` : `Unpin ${name}`,
            body: [h("p", {}, pinned ? "The controller does not move this tenant, except from a node that is removed." : "The controller may move this tenant again.")],
            button: pinned ? "Pin" : "Unpin",
            action: () => ({ action: pinned ? "pin" : "unpin", ...shown }),
            done: pinned ? `${name} is pinned.` : `${name} is not pinned any more.`,
          });
        },
      },
      pinned ? "Pin…" : "Unpin…",
    );
  const [pinButton, unpinButton] = [pin(true), pin(false)];
  const element = h(
    "section",
    { class: "tenant-head", "aria-label": "Summary" },
    h("div", { class: "head" }, h("h2", { class: "tenant-name" }, name), h("span", { class: "note" }, "at ", node), status),
    figures,
    h("div", { class: "buttons" }, move, pinButton, unpinButton, h("a", { class: "button", href: "#restore-title", onclick: jump }, "Restore…")),
    alert,
  );
  const update = () => {
    const tenant = model.tenant(name);
    const load = tenant?.load;
    setText(node, tenant?.node || "–");
    const state = tenant ? level(tenant) : "idle";
    status.className = `status ${state}`;
    setText(status, tenant ? `${LEVELS[state].mark} ${LEVELS[state].text}` : "");
    setAttribute(status, "title", tenant ? describe(tenant) : null);
    const shown: [string, string][] = [
      ["Latency", milliseconds(load?.latency_ms)],
      ["p50", milliseconds(load?.p50_ms)],
      ["p95", milliseconds(load?.p95_ms)],
      ["p99", milliseconds(load?.p99_ms)],
      ["Objective", milliseconds(tenant?.objectiveMs)],
      ["Requests/s", short(load?.requests_per_s)],
      ["Errors/s", short(load?.errors_per_s)],
      ["CPU", short(load?.cpu)],
      ["Size", bytes(load?.size_bytes)],
      ["Memory", bytes(load?.memory_bytes)],
    ];
    reconcile(
      figures,
      shown,
      ([title]) => title,
      ([title]) => h("div", {}, h("dt", {}, title), h("dd", {})),
      (item, [, value]) => setText(item.querySelector("dd") ?? item, value),
    );
    const isMoving = model.runningMoves().some((move) => move.tenant === name);
    const isKnownTenant = target().partition !== undefined;
    move.disabled = !model.isCluster || isMoving || !isKnownTenant;
    pinButton.disabled = unpinButton.disabled = !isKnownTenant;
    // The list is cut off: then it is not known.
    const isKnown = isPinned() || model.listed("pinned").length < MAX_LISTED;
    pinButton.hidden = !model.isCluster || (isKnown && isPinned());
    unpinButton.hidden = !model.isCluster || (isKnown && !isPinned());
    setText(alert, failure());
  };
  return { element, update };
}

function jump(event: Event): void {
  event.preventDefault();
  const section = document.getElementById("restore-title")?.closest("section") ?? null;
  section?.scrollIntoView({ block: "start" });
  focusHeading(section);
}

/** Latency and requests, as this page has seen them, and the forecast of the load. */
function chartPart(model: Model, name: string, forecast: () => ForecastRow[]): Page {
  const latency = createChart(
    "Latency of the tenant over time. The figures above have the newest values.",
    [
      { label: "Latency", colour: "--line-1", fill: true },
      { label: "p99", colour: "--line-2" },
      { label: "Objective", colour: "--line-3", dash: [2, 4] },
    ],
    milliseconds,
    150,
  );
  const load = createChart(
    "CPU of the tenant over time, and the forecast.",
    [
      { label: "CPU", colour: "--line-1", fill: true },
      { label: "Forecast", colour: "--line-2", dash: [6, 4] },
    ],
    short,
    130,
  );
  const element = h(
    "section",
    { class: "panel wide", "aria-labelledby": "chart-title" },
    h("h2", { id: "chart-title" }, "Latency and load"),
    latency.element,
    load.element,
  );
  const update = () => {
    const history: History = model.tenantHistory.get(name) ?? { at: [], values: {} };
    const column = (key: string) => history.values[key] ?? [];
    const highest = Math.max(0, ...column("latency_ms").concat(column("p99_ms")).map((value) => value ?? 0));
    // An objective that is far above the latency would leave the lines flat.
    const known = model.tenant(name)?.objectiveMs ?? null;
    const objective = known !== null && known <= highest * 10 ? known : null;
    latency.set(history.at, [column("latency_ms"), column("p99_ms"), history.at.map(() => objective)]);
    const merged = merge(history, [column("cpu")], forecast());
    load.set(merged.at, merged.values);
  };
  return {
    element,
    update,
    close: () => {
      latency.close();
      load.close();
    },
  };
}

/** The histogram of latencies since the owner has started. */
function latencyPart(details: () => Details | null): Page {
  const body = h("tbody", {});
  const empty = h("p", { class: "empty" });
  const element = h(
    "section",
    { class: "panel", "aria-labelledby": "histogram-title" },
    h("h2", { id: "histogram-title" }, "Latency histogram"),
    h(
      "table",
      { class: "histogram" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Up to"), h("th", { scope: "col" }, "Statements"), h("td", {}))),
      body,
    ),
    empty,
    h("p", { class: "note" }, "Since the tenant's node has started."),
  );
  const update = () => {
    const part = details()?.latencies;
    const buckets = rows<{ up_to_ms: number | null; statements: number }>(table(part));
    const most = Math.max(1, ...buckets.map((bucket) => bucket.statements));
    setEmpty(empty, details() !== null, buckets.length === 0, problem(part) || "No statements yet");
    reconcile(
      body,
      buckets,
      (bucket) => String(bucket.up_to_ms),
      (bucket) =>
        h(
          "tr",
          {},
          h("th", { scope: "row" }, bucket.up_to_ms === null ? "longer" : milliseconds(bucket.up_to_ms)),
          h("td", { class: "number" }),
          h("td", { class: "bars", "aria-hidden": "true" }, h("span", { class: "bar" })),
        ),
      (row, bucket) => {
        setText(row.querySelector(".number") ?? row, String(bucket.statements));
        const bar = row.querySelector<HTMLElement>(".bar");
        if (bar) {
          bar.style.width = `${(bucket.statements / most) * 100}%`;
        }
      },
    );
  };
  return { element, update };
}

/** The keys that are accessed most, while accesses are counted. */
function hotKeysPart(details: () => Details | null): Page {
  const body = h("tbody", {});
  const empty = h("p", { class: "empty" });
  const titles = ["Table", "Key", "Share"];
  const element = h(
    "section",
    { class: "panel hot-keys", "aria-labelledby": "hot-keys-title" },
    h("h2", { id: "hot-keys-title" }, "Hot keys"),
    h(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-labelledby": "hot-keys-title" },
      h("table", {}, h("thead", {}, h("tr", {}, ...titles.map((title) => h("th", { scope: "col" }, title)))), body),
    ),
    empty,
    h("p", { class: "note" }, "Counted while the tenant's node is overloaded, or as --key-monitoring states."),
  );
  const update = () => {
    const part = details()?.hot_keys;
    const keys = rows<{ table_name: string; key: string; share: number }>(table(part));
    setEmpty(empty, details() !== null, keys.length === 0, problem(part) || "None counted lately");
    reconcile(
      body,
      keys,
      (of) => JSON.stringify([of.table_name, of.key]),
      (of) => h("tr", {}, h("th", { scope: "row" }, of.table_name), h("td", {}, of.key), h("td", { class: "number" })),
      (row, of) => setText(row.cells[2] ?? row, percent(of.share)),
    );
  };
  return { element, update };
}

/** The statements that took the most time in total, since the tenant's nodes have started. */
function topStatementsPart(details: () => Details | null): Page {
  const body = h("tbody", {});
  const empty = h("p", { class: "empty" });
  const titles = ["Statement", "Calls", "Total", "Mean", "Longest", "Rows", "Errors"];
  const element = h(
    "section",
    { class: "panel top-statements", "aria-labelledby": "top-statements-title" },
    h("h2", { id: "top-statements-title" }, "Top statements"),
    h(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-labelledby": "top-statements-title" },
      h("table", {}, h("thead", {}, h("tr", {}, ...titles.map((title) => h("th", { scope: "col" }, title)))), body),
    ),
    empty,
    h("p", { class: "note" }, "By total time, per node. Constants are shown as ?."),
  );
  const update = () => {
    const part = details()?.top_statements;
    const statements = rows<TopStatementRow>(table(part));
    setEmpty(empty, details() !== null, statements.length === 0, problem(part) || "No statements yet");
    reconcile(
      body,
      statements,
      (of) => `${of.node} ${of.fingerprint}`,
      (of) =>
        h(
          "tr",
          { title: `At ${of.node}` },
          h("th", { scope: "row" }, h("code", {}, of.statement)),
          ...titles.slice(1).map(() => h("td", { class: "number" })),
        ),
      (row, of) => {
        const values = [
          short(of.calls),
          milliseconds(of.total_ms),
          milliseconds(of.mean_ms),
          milliseconds(of.max_ms),
          short(of.rows),
          short(of.errors),
        ];
        values.forEach((value, index) => setText(row.cells[index + 1] ?? row, value));
      },
    );
  };
  return { element, update };
}

function limitsPart(details: () => Details | null): Page {
  const body = h("tbody", {});
  const empty = h("p", { class: "empty" });
  const element = h(
    "section",
    { class: "panel", "aria-labelledby": "limits-title" },
    h("h2", { id: "limits-title" }, "Limits"),
    h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Limit"), h("th", { scope: "col" }, "Value"))), body),
    empty,
  );
  const update = () => {
    const part = details()?.limits;
    setEmpty(empty, details() !== null, problem(part) !== "", problem(part));
    reconcile(
      body,
      rows<{ name: string; value: string | null; default: string | null; about: string }>(table(part)),
      (limit) => limit.name,
      (limit) => h("tr", { title: limit.about }, h("th", { scope: "row" }, limit.name), h("td", {})),
      (row, limit) => {
        const cell = row.cells[1];
        if (cell) {
          setText(cell, limit.value ?? (limit.default === null ? "unlimited" : `${limit.default} (default)`));
        }
      },
    );
  };
  return { element, update };
}

interface RestorePoint {
  time: string;
  size_bytes: number;
  /** The number of restore points, and the time of the oldest one. */
  total: number;
  oldest: string;
}

/** The newest restore points, each with a button, and one for any time. */
function restorePart(target: () => Target, details: () => Details | null): Page {
  const list = h("ul", { class: "rows restore" });
  const empty = h("p", { class: "empty" });
  const note = h("p", { class: "note" });
  const other = h("button", { class: "small", onclick: () => restoreDialog(target(), null) }, "Restore to another time…");
  const element = h(
    "section",
    { class: "panel", "aria-labelledby": "restore-title" },
    h("h2", { id: "restore-title" }, "Restore points"),
    list,
    empty,
    note,
    h("div", { class: "buttons" }, other),
  );
  const update = () => {
    const part = details()?.history;
    const points = rows<RestorePoint>(table(part));
    setEmpty(empty, part !== undefined, points.length === 0, problem(part) || "No restore points yet");
    const first = points[0];
    const shown = first && points.length < first.total ? `The newest ${points.length} of ${first.total}. ` : "";
    setText(note, first ? `${shown}Any time since ${time(first.oldest)} can be restored.` : "");
    other.hidden = first === undefined;
    reconcile(
      list,
      points,
      (point) => point.time,
      (point) => {
        const item = h("li", { class: "line" });
        fill(
          item,
          h("time", { title: point.time }, time(point.time)),
          h("span", { class: "about" }, ` ${bytes(point.size_bytes)} `),
          h(
            "button",
            {
              class: "small",
              "aria-label": `Restore to ${time(point.time)}`,
              onclick: () => restoreDialog(target(), point.time),
            },
            "Restore…",
          ),
        );
        return item;
      },
      () => undefined,
    );
  };
  return { element, update };
}
