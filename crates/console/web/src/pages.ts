// The pages, except that of a tenant.

import { confirm } from "./dialogs";
import { h, keepFocus, reconcile, setAttribute, setText } from "./dom";
import { bytes, milliseconds, short } from "./format";
import { createDecisions, createEvents, createMoves, createSlowStatements, createStatements } from "./lists";
import { createLoad } from "./load";
import { createMap, tenantLink, type Page } from "./map";
import { LEVELS, level, type Model, type Tenant } from "./model";

/** Several parts as one page. */
export function combine(title: string, parts: Page[], layout: string): Page {
  const elements = parts.map((part) => part.element);
  const element = h("div", {}, h("h1", { class: "visually-hidden", tabindex: -1 }, title));
  if (layout === "columns") {
    // The first two parts are wide, the others alternate between two columns.
    const stacks = [0, 1].map((side) =>
      h("div", { class: "stack" }, ...elements.slice(2).filter((_, index) => index % 2 === side)),
    );
    element.append(...elements.slice(0, 2), h("div", { class: "columns" }, ...stacks));
  } else {
    element.append(...elements);
  }
  return {
    element,
    update: () => keepFocus(() => parts.forEach((part) => part.update())),
    close: () => parts.forEach((part) => part.close?.()),
  };
}

export function overviewPage(model: Model): Page {
  const parts = [
    createMap(model),
    createLoad(model),
    createMoves(model, null, 5),
    createDecisions(model, 6),
    createSlowStatements(model, 5),
    createEvents(model, null, 8, true),
  ];
  return combine("Cluster", parts, "columns");
}

export function activityPage(model: Model): Page {
  const statements = createStatements({
    statements: () => model.statements,
    isLoaded: () => model.has("statements"),
    node: () => model.thisNode,
    note: () => (model.isCluster ? `Statements of tenants that ${model.thisNode} serves.` : ""),
  });
  const parts = [statements, createSlowStatements(model, 20), createEvents(model, null, 100, true)];
  return combine("Activity", parts, "stack");
}

/** The controller: its mode, its plan, and all decisions. */
export function controllerPage(model: Model): Page {
  const facts = h("dl", { class: "facts" });
  const modes = h("div", { class: "buttons", role: "group", "aria-label": "Mode of the controller" }, "Set the mode to");
  const cancel = h(
    "button",
    {
      onclick: () =>
        confirm({
          title: "Cancel the plan",
          body: [h("p", {}, "Nodes that are being added or removed stay as they are. Moves in progress continue.")],
          button: "Cancel plan",
          action: () => ({ action: "cancel_plan" }),
          done: "The plan was cancelled.",
        }),
    },
    "Cancel plan",
  );
  for (const [mode, about] of [
    ["off", "The controller does nothing."],
    ["advise", "The controller decides and records its decisions, and carries none out."],
    ["on", "The controller moves tenants, and adds and removes nodes."],
  ] as const) {
    modes.append(
      h(
        "button",
        {
          "data-mode": mode,
          "aria-pressed": "false",
          onclick: () =>
            confirm({
              title: `Set the mode to ${mode}`,
              body: [h("p", {}, about)],
              button: `Set to ${mode}`,
              action: () => ({ action: "mode", mode }),
              done: `The mode is ${mode}.`,
            }),
        },
        mode,
      ),
    );
  }
  const panel = h(
    "section",
    { class: "panel", "aria-labelledby": "controller-title" },
    h("h2", { id: "controller-title" }, "Controller"),
    facts,
    modes,
    cancel,
  );
  const update = () => {
    const plan = model.control.get("plan") ?? "";
    const shown: [string, string][] = [
      ["Node", model.control.get("controller") || "–"],
      ["Mode", model.control.get("mode") ?? "–"],
      ["Policy", model.control.get("policy") ?? "–"],
      ["Plan", plan || "none"],
      ["Pinned tenants", model.control.get("pinned") || "none"],
      ["Forbidden nodes", model.control.get("forbidden") || "none"],
    ];
    facts.hidden = !model.isCluster;
    reconcile(
      facts,
      shown,
      ([name]) => name,
      ([name]) => h("div", {}, h("dt", {}, name), h("dd", {})),
      (element, [, value]) => setText(element.querySelector("dd") ?? element, value),
    );
    for (const button of modes.querySelectorAll("button")) {
      setAttribute(button, "aria-pressed", String(button.dataset["mode"] === model.control.get("mode")));
      button.disabled = !model.isCluster;
    }
    cancel.disabled = plan === "";
  };
  return combine("Controller", [{ element: panel, update }, createDecisions(model, 50)], "stack");
}

interface Column {
  title: string;
  text: (tenant: Tenant) => string;
  /** What rows are sorted by, in descending order if it is a number. */
  sort: (tenant: Tenant) => number | string;
}

const COLUMNS: Column[] = [
  { title: "Tenant", text: (of) => of.name, sort: (of) => of.name },
  { title: "Node", text: (of) => of.node, sort: (of) => of.node },
  { title: "Size", text: (of) => bytes(of.load?.size_bytes), sort: (of) => of.load?.size_bytes ?? -1 },
  { title: "Requests/s", text: (of) => short(of.load?.requests_per_s), sort: (of) => of.load?.requests_per_s ?? -1 },
  { title: "CPU", text: (of) => short(of.load?.cpu), sort: (of) => of.load?.cpu ?? -1 },
  { title: "Latency", text: (of) => milliseconds(of.load?.latency_ms), sort: (of) => of.load?.latency_ms ?? -1 },
  { title: "p99", text: (of) => milliseconds(of.load?.p99_ms), sort: (of) => of.load?.p99_ms ?? -1 },
  { title: "Objective", text: (of) => milliseconds(of.objectiveMs), sort: (of) => of.objectiveMs ?? -1 },
];

const MAX_ROWS = 500;

/** All known tenants as a table. */
export function tenantsPage(model: Model): Page {
  let sorted = COLUMNS[4];
  const body = h("tbody", {});
  const heads = COLUMNS.map((column) =>
    h(
      "th",
      { scope: "col" },
      h(
        "button",
        {
          class: "plain",
          onclick: () => {
            sorted = column;
            update();
          },
        },
        column.title,
      ),
    ),
  );
  const note = h("p", { class: "note" });
  const element = h(
    "section",
    { class: "panel", "aria-labelledby": "tenants-title" },
    h("h2", { id: "tenants-title" }, "Tenants"),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-labelledby": "tenants-title" }, h("table", {}, h("thead", {}, h("tr", {}, ...heads)), body)),
    note,
  );
  const update = () => {
    const column = sorted ?? COLUMNS[0];
    const tenants = model.tenants();
    tenants.sort((a, b) => {
      const [x, y] = [column?.sort(a) ?? 0, column?.sort(b) ?? 0];
      const order = typeof x === "number" && typeof y === "number" ? y - x : String(x) < String(y) ? -1 : 1;
      return order === 0 ? (a.name < b.name ? -1 : 1) : order;
    });
    heads.forEach((head, index) => {
      const isSorted = COLUMNS[index] === column;
      setAttribute(head, "aria-sort", isSorted ? (index < 2 ? "ascending" : "descending") : null);
    });
    const cutOff = tenants.length > MAX_ROWS ? `The first ${MAX_ROWS}. The search finds the others.` : "";
    setText(note, model.has("tenants") ? cutOff : "Loading…");
    reconcile(body, tenants.slice(0, MAX_ROWS), (tenant) => tenant.name, createRow, updateRow);
  };
  return combine("Tenants", [{ element, update }], "stack");
}

function createRow(tenant: Tenant): HTMLTableRowElement {
  const cells = COLUMNS.map((_, index) =>
    index === 0
      ? h(
          "th",
          { scope: "row" },
          h("span", { class: "mark", "aria-hidden": "true" }),
          h("a", { href: tenantLink(tenant.name) }, tenant.name),
          h("span", { class: "visually-hidden about" }),
        )
      : h("td", {}),
  );
  return h("tr", {}, ...cells);
}

function updateRow(row: HTMLTableRowElement, tenant: Tenant): void {
  const name = level(tenant);
  const mark = row.querySelector(".mark");
  if (mark) {
    mark.className = `mark ${name}`;
    setText(mark, LEVELS[name].mark);
  }
  setText(row.querySelector(".about") ?? row, `, ${LEVELS[name].text}`);
  COLUMNS.forEach((column, index) => {
    const cell = row.cells[index];
    if (index > 0 && cell) {
      setText(cell, column.text(tenant));
    }
  });
}
