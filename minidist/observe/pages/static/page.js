// What every page has: a question goes to Python, an answer comes back; the state is in the address.
//
//   ask({schedule: "1f1b", p: 4, m: 8})  -> a promise of the answer of minidist/observe/pages/<page>.py
//   first()                              -> {question, answer}, made when the page was built
//   state({p: 4, m: 8}, draw)            -> the values in the address; draw(values) after each change;
//                                           a third function may change what the address has brought
//   h("p", {class: "x"}, "words", child), svg("rect", {x: 0})   -> an element
//   latest(f)                            -> f, of which only the newest call's promise is answered
//
// Three answer: the server of `minidist explore`, a table recorded when the site was built, and
// Pyodide, which runs the package in a worker of this page.

export const page = document.documentElement.dataset.page;
const server = document.querySelector('meta[name="minidist-token"]')?.content;
export const onServer = server !== undefined;
export const LIMIT = 5000; // milliseconds that a reader's Python may take in this page

// ---- questions and answers

export function first() {
  const text = document.getElementById("first")?.textContent ?? "";
  return text.trim().startsWith("{") ? JSON.parse(text) : null;
}

export async function ask(question) {
  if (onServer) return post("answer", { page, ...question });
  if (document.documentElement.dataset.answers === "recorded") return recorded(question);
  return inPyodide({ page, ...question });
}

// POST to the server of `minidist explore`; what it says of a failure is an answer, too.
export async function post(path, body) {
  try {
    const headers = { "Content-Type": "application/json", "X-Token": server };
    const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body) });
    return await response.json();
  } catch (error) {
    return { error: `minidist explore does not answer (${error.message}); start it again` };
  }
}

let table;
async function recorded(question) {
  table ??= fetch(`answers/${page}.json`).then((response) => response.json());
  const answer = (await table)[asKey(question)];
  return answer ?? { error: `this page has no recorded answer to ${asKey(question)}` };
}

// A question as text, as `as_key` of answers.py writes it: keys sorted.
function asKey(question) {
  return JSON.stringify(Object.fromEntries(Object.entries(question).sort(([a], [b]) => (a < b ? -1 : 1))));
}

let worker, waiting = new Map(), number = 0;
function inPyodide(question) {
  if (!worker) {
    worker = new Worker("pyodide_worker.js", { type: "module" });
    worker.ready = new Promise((resolve, reject) => {
      worker.onmessage = ({ data }) => {
        if (data.ready) resolve();
        else if (data.failed) reject(new Error(data.failed));
        else if (waiting.has(data.number)) {
          waiting.get(data.number)(JSON.parse(data.answer));
          waiting.delete(data.number);
        }
      };
      worker.onerror = (event) => reject(new Error(event.message || "the worker did not start"));
    });
    say("Python is loading");
    worker.ready.then(() => say("Python is ready"), () => {});
  }
  const current = worker, own = number++;
  return current.ready.then(
    () => new Promise((resolve) => {
      const stop = setTimeout(() => { // endless: a worker cannot be interrupted, only ended
        current.terminate();
        worker = undefined;
        for (const answer of waiting.values()) {
          answer({ error: `stopped after ${LIMIT / 1000} s; does a loop not end?` });
        }
        waiting.clear();
      }, LIMIT);
      waiting.set(own, (answer) => { clearTimeout(stop); resolve(answer); });
      current.postMessage({ number: own, question: JSON.stringify(question) });
    }),
    (error) => ({ error: `Python did not start in this browser: ${error.message}` }),
  );
}

// One long question in a worker of its own, beside which the page is answered; stop() ends it.
export function alone(question, limit) {
  let end;
  const ended = new Promise((resolve) => { end = (words) => resolve({ error: words }); });
  const clock = setTimeout(() => end(`stopped after ${limit / 1000} s`), limit);
  const own = onServer ? null : new Worker("pyodide_worker.js", { type: "module" });
  const answered = own === null ? ask(question) : new Promise((resolve) => {
    own.onmessage = ({ data }) => {
      if (data.ready) own.postMessage({ number: 0, question: JSON.stringify({ page, ...question }) });
      else resolve(data.failed ? { error: data.failed } : JSON.parse(data.answer));
    };
    own.onerror = (event) => resolve({ error: event.message || "the worker did not start" });
  });
  const answer = Promise.race([answered, ended]).finally(() => { clearTimeout(clock); own?.terminate(); });
  return { answer, stop: () => end("stopped") };
}

export function latest(asked) {
  let newest = 0;
  return async (...given) => {
    const own = ++newest;
    const answer = await asked(...given);
    return own === newest ? answer : null;
  };
}

// ---- the state, in the address after #

export function state(usual, draw, brought = () => {}) {
  const values = { ...usual };
  const read = () => {
    const given = new URLSearchParams(location.hash.slice(1));
    for (const [name, value] of Object.entries(usual)) {
      const text = given.get(name);
      values[name] = text === null ? value : typeof value === "number" ? Number(text) : text;
    }
    brought(values);
  };
  const write = () => {
    const changed = Object.entries(values).filter(([name, value]) => value !== usual[name]);
    const hash = new URLSearchParams(changed.map(([name, value]) => [name, String(value)])).toString();
    try {
      history.replaceState(null, "", location.pathname + location.search + (hash && `#${hash}`));
    } catch { /* too many in a short time, says Safari: the next change writes it */ }
  };
  read();
  addEventListener("hashchange", () => { read(); fill(); draw(values); });
  const inputs = () => document.querySelectorAll("[data-state]");
  const fill = () => {
    for (const input of inputs()) {
      const value = values[input.dataset.state];
      if (input.type === "checkbox") input.checked = value === "yes";
      else input.value = value;
    }
  };
  const set = (change) => { Object.assign(values, change); write(); fill(); draw(values); };
  for (const input of inputs()) {
    input.addEventListener("input", () => {
      const name = input.dataset.state;
      const value = input.type === "checkbox" ? (input.checked ? "yes" : "no") : input.value;
      if (typeof usual[name] === "number" && (value === "" || Number.isNaN(Number(value)))) return;
      values[name] = typeof usual[name] === "number" ? Number(value) : value;
      write();
      draw(values);
    });
  }
  fill();
  return { values, set };
}

// ---- elements

const filled = (element, attributes, children) => {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
};
export const h = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) =>
  filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
export const $ = (id) => document.getElementById(id);
export const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c6d1f", "#7a5fb5"]; // of ranks

export function say(words) { // for those who look and those who listen
  const status = $("status");
  if (status) status.textContent = words;
}

// ---- a link inside the page: the address keeps the state, so it is not in the address

for (const link of document.querySelectorAll('a[href^="#"]')) {
  link.addEventListener("click", (event) => {
    const target = $(link.hash.slice(1));
    event.preventDefault();
    target.tabIndex = -1;
    target.focus();
    target.scrollIntoView();
  });
}

// ---- light and dark, as the rest of the site has it

const dark = matchMedia("(prefers-color-scheme: dark)");
function paint() {
  const mode = localStorage.getItem("mode") || "auto";
  document.documentElement.dataset.theme = mode === "auto" ? (dark.matches ? "dark" : "light") : mode;
}
dark.addEventListener("change", paint);
paint();
const button = h("button", { type: "button", onclick: () => {
  localStorage.setItem("mode", document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  paint();
} }, "Light or dark");
document.querySelector("header")?.append(button);
if (onServer) { // the token goes with every link to another page; those of the site are not here
  for (const link of document.querySelectorAll("a[href]")) {
    const href = link.getAttribute("href");
    if (link.matches(".home")) link.href = `index.html${location.search}`;
    else if (href.startsWith("../")) link.removeAttribute("href");
    else if (!href.startsWith("#")) link.search = location.search;
  }
}
