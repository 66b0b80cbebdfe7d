// The map: a card per node, with its load, and a treemap of its tenants.

import { confirm } from "./dialogs";
import { h, reconcile, setAttribute, setText } from "./dom";
import { bytes, count, milliseconds, percent, short } from "./format";
import { LEVELS, level, type Level, type Model, type NodeRow, type Tenant } from "./model";
import { squarify } from "./treemap";

/** Tenants of a node that have a tile. */
const MAX_TILES = 60;
/** A tile takes at least this share of the map, so that it can be seen. */
const MIN_SHARE = 0.012;
/** Width of a map by its height. */
const ASPECT = 2.2;

export interface Page {
  element: HTMLElement;
  update(): void;
  close?(): void;
}

export function tenantLink(name: string): string {
  return `#/tenant/${encodeURIComponent(name)}`;
}

/** The heading "Nodes and tenants" with the map. */
export function createMap(model: Model): Page {
  const cards = h("ul", { class: "nodes" });
  const legend = h("ul", { class: "legend", "aria-label": "Legend" });
  for (const name of ["within", "near", "over", "none", "idle"] as Level[]) {
    const { mark, text } = LEVELS[name];
    legend.append(h("li", {}, h("span", { class: `swatch ${name}`, "aria-hidden": "true" }, mark), text));
  }
  const element = h(
    "section",
    { "aria-labelledby": "map-title" },
    h("div", { class: "head" }, h("h2", { id: "map-title" }, "Nodes and tenants"), legend),
    cards,
    h("p", { class: "note" }, "Area: size of the data. Bar: share of the node's CPU. Colour and mark: latency against the tenant's objective."),
  );
  const update = () => {
    const tenants = model.tenants();
    reconcile(cards, model.allNodes(), (node) => node.name, createCard, (card, node) =>
      updateCard(card, node, tenants.filter((tenant) => tenant.node === node.name), model),
    );
  };
  return { element, update };
}

function meter(label: string, name: string): HTMLElement {
  return h(
    "div",
    { class: `meter ${name}` },
    h("span", { class: "label" }, label),
    h("span", { class: "track", "aria-hidden": "true" }, h("span", { class: "bar" })),
    h("span", { class: "value" }),
  );
}

function setMeter(card: HTMLElement, name: string, share: number | null, text: string): void {
  const element = card.querySelector(`.meter.${name}`);
  if (element) {
    const bar = element.querySelector<HTMLElement>(".bar");
    if (bar) {
      bar.style.width = `${Math.min(100, Math.max(0, (share ?? 0) * 100))}%`;
      bar.classList.toggle("high", (share ?? 0) > 0.85);
    }
    setText(element.querySelector(".value") ?? element, text);
  }
}

function createCard(node: NodeRow): HTMLElement {
  return h(
    "li",
    { class: "node", "data-node": node.name },
    h(
      "div",
      { class: "node-head" },
      h("h3", {}, node.name),
      h("span", { class: "badge" }),
      h("span", { class: "place" }),
      h("button", { class: "small", onclick: (event) => forbid(node.name, event.currentTarget as HTMLElement) }),
    ),
    h("div", { class: "meters" }, meter("CPU", "cpu"), meter("Memory", "memory")),
    h("p", { class: "figures" }),
    h("ul", { class: "tiles", "aria-label": `Tenants of ${node.name}` }),
    h("p", { class: "more" }),
  );
}

function part(card: HTMLElement, selector: string): HTMLElement {
  return card.querySelector<HTMLElement>(selector) ?? card;
}

/** Asks whether the controller may move tenants to a node. */
function forbid(node: string, button: HTMLElement): void {
  const isForbidden = button.dataset["forbidden"] === "true";
  confirm({
    title: isForbidden ? `Allow moves to ${node}` : `Forbid moves to ${node}`,
    body: [
      h("p", {}, isForbidden ? "The controller may move tenants to this node again." : "The controller moves no tenants to this node. Its tenants stay."),
    ],
    button: isForbidden ? "Allow" : "Forbid",
    action: () => ({ action: isForbidden ? "allow" : "forbid", node }),
    done: isForbidden ? `${node} is allowed.` : `${node} is forbidden.`,
  });
}

/** The states of nodes that are in order. */
const GOOD_STATES = new Set(["alive"]);

function updateCard(card: HTMLElement, node: NodeRow, tenants: Tenant[], model: Model): void {
  const load = model.nodeLoad.get(node.name);
  const badge = part(card, ".badge");
  const isForbidden = model.listed("forbidden").includes(node.name);
  const state = [node.state, node.slow ? "slow" : "", isForbidden ? "forbidden" : ""].filter((text) => text !== "");
  setText(badge, state.join(", "));
  setAttribute(badge, "title", node.slow);
  badge.classList.toggle("bad", !GOOD_STATES.has(node.state) || node.slow !== null);
  const button = part(card, "button");
  button.hidden = !model.isCluster;
  setAttribute(button, "data-forbidden", String(isForbidden));
  setText(button, isForbidden ? "Allow…" : "Forbid…");
  setAttribute(button, "aria-label", `${isForbidden ? "Allow" : "Forbid"} moves to ${node.name}`);
  setText(part(card, ".place"), [node.site, node.rack].filter((text) => text !== "").join(" / "));
  const share = load?.cpu !== null && load?.cpu !== undefined && load.capacity ? load.cpu / load.capacity : null;
  setMeter(card, "cpu", share, load?.cpu == null ? "–" : `${short(load.cpu)} of ${short(load.capacity)}`);
  const memory = load?.used_memory_bytes != null && load.memory_bytes ? load.used_memory_bytes / load.memory_bytes : null;
  setMeter(card, "memory", memory, memory === null ? "–" : percent(memory));
  const figures = load?.error
    ? `No load report: ${load.error}`
    : `${short(load?.requests_per_s)} requests/s, writes ${bytes(Math.round(load?.written_bytes_per_s ?? 0))}/s`;
  setText(part(card, ".figures"), figures);

  tenants.sort((a, b) => weight(b) - weight(a) || (a.name < b.name ? -1 : 1));
  const shown = tenants.slice(0, MAX_TILES);
  const total = shown.reduce((sum, tenant) => sum + weight(tenant), 0);
  const sizes = shown.map((tenant) => Math.max(weight(tenant), total * MIN_SHARE, 1));
  const places = squarify(sizes, ASPECT);
  const moving = new Map(model.runningMoves().map((move) => [move.tenant, move]));
  reconcile(part(card, ".tiles"), shown, (tenant) => tenant.name, createTile, (tile, tenant) => {
    const place = places[shown.indexOf(tenant)];
    if (place) {
      tile.style.left = `${place.x}%`;
      tile.style.top = `${place.y}%`;
      tile.style.width = `${place.width}%`;
      tile.style.height = `${place.height}%`;
    }
    const move = moving.get(tenant.name);
    updateTile(tile, tenant, load?.capacity ?? null, move && move.source === node.name ? move.destination : null);
  });
  const hidden = Math.max(node.partitions, tenants.length) - shown.length;
  const text = hidden > 0 && tenants.length > shown.length ? `and ${count(hidden, "more tenant")}` : "";
  setText(part(card, ".more"), shown.length > 0 ? text : model.has("tenants") ? "No tenants" : "Loading…");
}

/** The share of a tenant in its node's map. */
function weight(tenant: Tenant): number {
  return tenant.load?.size_bytes ?? 0;
}

function createTile(tenant: Tenant): HTMLElement {
  return h(
    "li",
    { class: "tile" },
    h(
      "a",
      { href: tenantLink(tenant.name), "data-tenant": tenant.name },
      h("span", { class: "mark", "aria-hidden": "true" }),
      h("span", { class: "name" }, tenant.name),
      h("span", { class: "moving" }),
      h("span", { class: "visually-hidden about" }),
      h("span", { class: "load", "aria-hidden": "true" }),
    ),
  );
}

/** A tenant in words. */
export function describe(tenant: Tenant): string {
  const { load } = tenant;
  if (!load) {
    return "idle";
  }
  const objective = tenant.objectiveMs === null ? "" : `, objective ${milliseconds(tenant.objectiveMs)}`;
  return (
    `${bytes(load.size_bytes)}, ${short(load.requests_per_s)} requests/s, ${short(load.cpu)} CPU, ` +
    `latency ${milliseconds(load.latency_ms)}${objective}: ${LEVELS[level(tenant)].text}`
  );
}

function updateTile(tile: HTMLElement, tenant: Tenant, capacity: number | null, destination: string | null): void {
  const name = level(tenant);
  tile.className = `tile ${name}${destination ? " is-moving" : ""}`;
  setText(part(tile, ".mark"), LEVELS[name].mark);
  setText(part(tile, ".moving"), destination ? `→ ${destination}` : "");
  const about = describe(tenant);
  setText(part(tile, ".about"), `: ${about}`);
  setAttribute(part(tile, "a"), "title", `${tenant.name}: ${about}`);
  const share = tenant.load && capacity ? tenant.load.cpu / capacity : 0;
  part(tile, ".load").style.width = `calc((100% - 10px) * ${Math.min(1, share).toFixed(3)})`;
}
