// Dialogs that confirm an action, and run it.

import { ApiError, act } from "./api";
import { announce, h, type Child } from "./dom";

export interface Confirmation {
  title: string;
  /** What will happen. */
  body: Child[];
  button: string;
  isDangerous?: boolean;
  /** The action. Null if the form is not complete. */
  action: () => Record<string, string> | null;
  /** What is announced afterwards. */
  done: string;
  running?: string;
}

/** Asks for a confirmation, runs the action, and shows its error in the dialog. */
export function confirm({ title, body, button, isDangerous, action, done, running }: Confirmation): void {
  const problem = h("p", { class: "problem", role: "alert" });
  const submit = h("button", { type: "submit", class: isDangerous ? "danger" : "primary" }, button);
  const cancel = h("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
  const send = async (event: Event) => {
    event.preventDefault();
    const request = action();
    if (!request) {
      return;
    }
    submit.disabled = true;
    problem.textContent = "";
    try {
      const isRunning = await act(request);
      dialog.close();
      announce(isRunning ? (running ?? done) : done);
    } catch (error) {
      problem.textContent = errorText(error);
      submit.disabled = false;
    }
  };
  const dialog = h(
    "dialog",
    { "aria-labelledby": "dialog-title" },
    h(
      "form",
      { onsubmit: (event) => void send(event) },
      h("h2", { id: "dialog-title" }, title),
      ...body,
      problem,
      h("div", { class: "buttons" }, cancel, submit),
    ),
  );
  const opener = document.activeElement;
  dialog.addEventListener("close", () => {
    dialog.remove();
    if (opener instanceof HTMLElement && opener.isConnected) {
      opener.focus();
    }
  });
  document.body.append(dialog);
  dialog.showModal();
}

/** An error in words. */
export function errorText(error: unknown): string {
  if (error instanceof ApiError) {
    return [error.message, error.detail, error.hint].filter((text) => text).join(" ");
  }
  return error instanceof Error ? error.message : String(error);
}

/** Asks for the node to move a tenant to. */
export function moveDialog(tenant: string, from: string, nodes: string[]): void {
  const select = h(
    "select",
    { id: "destination", required: true },
    ...nodes.map((node) => h("option", { value: node }, node)),
  );
  confirm({
    title: `Move ${tenant}`,
    body: [
      h("p", {}, `The tenant is served by ${from || "no node"} now. Clients stay connected, and wait shortly at the handover.`),
      h("label", { for: "destination" }, "Destination"),
      select,
    ],
    button: "Move",
    action: () => (select.value ? { action: "move", database: tenant, node: select.value } : null),
    done: `${tenant} was moved.`,
    running: `${tenant} is being moved.`,
  });
}

/** Asks for the confirmation of a restore, for which the tenant's name must be entered. */
export function restoreDialog(tenant: string, timestamp: string): void {
  const input = h("input", { id: "confirm-name", autocomplete: "off", required: true });
  confirm({
    title: `Restore ${tenant}`,
    body: [
      h("p", {}, `The tenant is restored to ${timestamp}. Its sessions are terminated, and later changes disappear. They can be restored as long as their restore points are retained.`),
      h("label", { for: "confirm-name" }, `Enter the tenant's name, ${tenant}, to confirm`),
      input,
    ],
    button: "Restore",
    isDangerous: true,
    action: () => {
      input.setCustomValidity(input.value === tenant ? "" : "This is not the tenant's name.");
      input.addEventListener("input", () => input.setCustomValidity(""), { once: true });
      return input.reportValidity() ? { action: "restore", database: tenant, timestamp } : null;
    },
    done: `${tenant} was restored.`,
    running: `${tenant} is being restored.`,
  });
}
