// Creates and updates elements. Data is only ever written as text or as an attribute's value, never
// parsed as HTML.

export type Child = Node | string | number | null | undefined | false;

type Attributes = Record<string, string | number | boolean | null | undefined | ((event: Event) => void)>;

/** Creates an element. Attributes that begin with "on" are event listeners. */
export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") {
      element.addEventListener(name.slice(2), value);
    } else if (value === true) {
      element.setAttribute(name, "");
    } else if (value !== false && value !== null && value !== undefined) {
      element.setAttribute(name, String(value));
    }
  }
  append(element, children);
  return element;
}

function append(parent: Node, children: Child[]): void {
  for (const child of children) {
    if (child !== null && child !== undefined && child !== false) {
      parent.appendChild(child instanceof Node ? child : document.createTextNode(String(child)));
    }
  }
}

/** Replaces the children of an element. */
export function fill(parent: Element, ...children: Child[]): void {
  parent.replaceChildren();
  append(parent, children);
}

/** Sets the text of an element if it differs, so that screen readers do not repeat it. */
export function setText(element: Element, text: string): void {
  if (element.textContent !== text) {
    element.textContent = text;
  }
}

export function setAttribute(element: Element, name: string, value: string | null): void {
  if (value === null) {
    element.removeAttribute(name);
  } else if (element.getAttribute(name) !== value) {
    element.setAttribute(name, value);
  }
}

/**
 * Makes the children of an element those of the items: an item whose key was there keeps its element,
 * and with it the focus.
 */
export function reconcile<T, E extends HTMLElement>(
  parent: HTMLElement,
  items: T[],
  key: (item: T) => string,
  create: (item: T) => E,
  update: (element: E, item: T) => void,
): void {
  const active = document.activeElement;
  const hasFocus = active instanceof HTMLElement && parent.contains(active);
  const keys = new Set(items.map(key));
  const old = new Map<string, E>();
  for (const element of Array.from(parent.children) as E[]) {
    const name = element.dataset["key"] ?? "";
    if (keys.has(name)) {
      old.set(name, element);
    } else {
      element.remove();
    }
  }
  let next: Element | null = parent.firstElementChild;
  for (const item of items) {
    const name = key(item);
    let element = old.get(name);
    if (!element) {
      element = create(item);
      element.dataset["key"] = name;
    }
    update(element, item);
    if (element === next) {
      next = next.nextElementSibling;
    } else {
      parent.insertBefore(element, next);
    }
  }
  // An element that was put at another place has lost the focus.
  if (hasFocus && active !== document.activeElement) {
    active.focus({ preventScroll: true });
  }
}

const ANNOUNCED_MS = 10_000;
/** Problems are shown longer than other messages. */
const PROBLEM_MS = 60_000;

let announced = 0;

/** Shows a message for some seconds. Screen readers read it. */
export function announce(text: string, isProblem = false): void {
  const announcer = document.getElementById("announcer");
  if (announcer) {
    announcer.textContent = text;
    announcer.classList.toggle("bad", isProblem);
    window.clearTimeout(announced);
    announced = window.setTimeout(() => announcer.replaceChildren(), isProblem ? PROBLEM_MS : ANNOUNCED_MS);
  }
}

/** Focuses the heading of a section, or of the page if the section was removed. */
export function focusHeading(section: Element | null): void {
  const heading = (section?.isConnected ? section.querySelector<HTMLElement>("h2") : null) ?? document.querySelector("h1");
  heading?.setAttribute("tabindex", "-1");
  heading?.focus({ preventScroll: true });
}

/** Whether an element can have the focus: it was not hidden, disabled or removed. */
export function isFocusable(element: HTMLElement): boolean {
  return element.isConnected && element.checkVisibility() && !element.matches(":disabled");
}

/** Runs an update. If the element with the focus cannot keep it, the heading of its section gets it. */
export function keepFocus(update: () => void): void {
  const active = document.activeElement;
  const section = active?.closest("section") ?? null;
  update();
  if (section && active instanceof HTMLElement && !isFocusable(active)) {
    focusHeading(section);
  }
}
