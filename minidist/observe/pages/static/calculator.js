// The calculator: a form, two bars, and each number with its equation, its function and its test.
import { $, alone, ask, first, h, latest, say, state } from "./page.js";

const { question, answer } = first();
const { choices } = answer;
const { ask: _, ...usual } = question; // ask: "first" also asks for what can be chosen
const SEARCH = 120_000; // milliseconds that a search may take
const COLOURS = {
  parameters: "--forward", gradients: "--backward", optimizer: "--weight", activations: "--own",
  products: "--forward", "element-wise": "--own", tensor: "--sent", experts: "--emphasis",
  context: "--input", data: "--backward", waiting: "--idle", published: "--muted",
};
const GROUPS = {
  totals: "The step as a whole",
  memory: "Bytes that the fullest rank holds",
  spent: "Seconds of the step, the mean over all ranks",
  sent: "Bytes that the busiest rank sends in a step",
};

// ---- the bars

const colour = (name) => `var(${COLOURS[name] ?? "--idle"})`;
const percent = (part, whole) => `${(100 * part) / whole}%`;

function bar(words, parts, whole, ...more) {
  const row = h("div", { class: "bar", role: "img", "aria-label": words });
  for (const part of parts) {
    const piece = h("span", { title: `${part.words}: ${part.text}` });
    piece.style.width = percent(part.value, whole);
    piece.style.background = colour(part.name);
    row.append(piece);
  }
  row.append(...more);
  return row;
}

function legend(parts) {
  const items = parts.map(({ name, words, text }) => h("li", {}, swatch(name), `${words} ${text}`));
  return h("ul", { class: "legend" }, items);
}

function swatch(name) {
  const square = h("span", { class: "swatch", "aria-hidden": "true" });
  square.style.background = colour(name);
  return square;
}

const inWords = (parts) => parts.map(({ words, text }) => `${words} ${text}`).join(", ");

function memoryBar({ memory, room, room_text, held, fits }) {
  const whole = 1.04 * Math.max(room, held.value);
  const line = h("span", { class: "limit" });
  line.style.left = percent(room, whole);
  const words = `The fullest rank holds ${held.text} of ${room_text}: ${inWords(memory)}`;
  return [
    h("p", { class: fits ? "" : "large" }, h("b", {}, "Bytes "), `${held.text} of ${room_text}`),
    bar(words, memory, whole, line),
    legend(memory),
  ];
}

function secondsBar({ spent, seconds, published }) {
  const whole = 1.04 * Math.max(seconds.value, published?.value ?? 0);
  const drawn = [
    h("p", {}, h("b", {}, "Seconds "), `${seconds.text} a step`),
    bar(`A step takes ${seconds.text}: ${inWords(spent)}`, spent, whole),
    legend(spent),
  ];
  if (published) {
    const own = { name: "published", words: "as published", text: published.seconds, value: published.value };
    drawn.push(bar(inWords([own]), [own], whole), legend([own]));
  }
  return drawn;
}

// ---- the numbers

function glance({ fits, totals, room_text, published }) {
  const [seconds, mfu, held] = totals;
  const boxes = [
    ["One step", seconds.text],
    ["MFU, model FLOPs utilization", mfu.text],
    ["Ranks (GPUs)", ranks().toLocaleString("en")],
    ["The fullest rank holds", `${held.text} of ${room_text}`],
    ["It fits", fits ? "yes" : "no", fits ? "good" : "fault"],
  ];
  if (published) {
    boxes.push(["Published", `${published.seconds}, ${published.mfu}`]);
    boxes.push(["Predicted / published", published.ratio]);
  }
  return boxes.map(([name, text, look]) => h("div", { class: look }, h("dt", {}, name), h("dd", {}, text)));
}

const open = new Set(); // what the reader has unfolded stays so

function line(group, each) {
  const key = `${group} ${each.name}`;
  const square = group === "memory" || group === "spent" ? swatch(each.name) : null;
  const unfold = h("details", {
    open: open.has(key) ? "" : null,
    ontoggle: () => (unfold.open ? open.add(key) : open.delete(key)),
  },
    h("summary", {}, square, `${each.words} `, h("b", {}, each.text)),
    h("p", { class: "equation" }, `${each.text} = ${each.equation}`),
    h("dl", { class: "source" },
      h("dt", {}, "Here"), h("dd", {}, each.here),
      h("dt", {}, "Function"), h("dd", {}, h("code", {}, each.function)),
      h("dt", {}, "Test"), h("dd", {}, h("code", {}, each.test))));
  return unfold;
}

const asText = ({ words, text, equation, here, function: own, test }) =>
  `${words}: ${text} = ${equation}. Here: ${here}. ${own}; ${test}`;

function show(found) {
  $("fault").hidden = found.error === undefined;
  for (const id of ["result", "glance"]) {
    $(id).classList.remove("old");
    $(id).classList.toggle("stale", found.error !== undefined);
  }
  if (found.error !== undefined) {
    $("fault").textContent = found.error;
    return;
  }
  const [seconds, , held] = found.totals;
  const words = $("bars").lastElementChild; // the caption
  $("bars").replaceChildren(...memoryBar({ ...found, held }), ...secondsBar({ ...found, seconds }), words);
  $("glance").replaceChildren(...glance(found));
  const groups = Object.entries(GROUPS).filter(([group]) => found[group]);
  $("sources-list").replaceChildren(...groups.flatMap(([group, title]) => [
    h("h3", {}, title), ...found[group].map((each) => line(group, each)),
  ]));
  for (const kind of ["runs", "models", "machines"]) $(kind).value = found[kind];
  $("text").textContent = groups.flatMap(([group]) => found[group].map(asText)).join("\n");
}

// ---- the form

for (const name of choices.schedules) $("schedules").append(h("option", {}, name));
for (const kind of ["runs", "models", "machines"]) {
  for (const name of Object.keys(choices[kind])) $(kind).append(h("option", {}, name));
  $(kind).addEventListener("input", (event) => {
    const fields = choices[kind][event.target.value];
    if (fields) set(fields);
    else draw(values); // "your own": the form says what it is
  });
}

const asked = latest(ask);
async function draw(now) {
  forget();
  for (const id of ["result", "glance"]) $(id).classList.add("old"); // until the answer is there
  const found = await asked({ ...now });
  if (found) show(found);
}
const { values, set } = state(usual, draw);

// ---- the search

let searching = null;
const ranks = () => values.dp * values.pp * values.tp * values.cp;

function forget() { // the form has changed: plans that were found are for another one
  $("search").textContent = `Search for the best plans on ${ranks().toLocaleString("en")} ranks`;
  if (searching) searching.stop();
}

$("search").addEventListener("click", async () => {
  const began = Date.now();
  const own = searching = alone({ ask: "search", ...values }, SEARCH);
  $("stop").hidden = false;
  $("search").disabled = true;
  const tick = () => {
    $("progress").textContent = `searching, ${Math.round((Date.now() - began) / 1000)} s`;
  };
  const clock = setInterval(tick, 1000);
  tick();
  const found = await own.answer;
  clearInterval(clock);
  searching = null;
  $("stop").hidden = true;
  $("search").disabled = false;
  const took = `found in ${((Date.now() - began) / 1000).toFixed(1)} s`;
  $("progress").textContent = found.error ?? took;
  $("plans").hidden = found.error !== undefined;
  if (!found.error) $("plans").replaceChildren(table(found.plans));
});
$("stop").addEventListener("click", () => searching?.stop());

function table(plans) {
  const head = ["Step", "Holds", "MFU", "Plan", "Why it is not the best", "Into the form"];
  const rows = plans.map((plan) => h("tr", { class: plan.fits ? null : "large" },
    h("td", { class: "number" }, plan.seconds),
    h("td", { class: "number" }, plan.held),
    h("td", { class: "number" }, plan.mfu),
    h("td", {}, h("code", {}, plan.short)),
    h("td", {}, plan.why || "the best"),
    h("td", {}, h("button", { type: "button", "aria-label": `Use ${plan.short}`, onclick: () => {
      set(plan.fields);
      say(`The form has the plan ${plan.short}`);
      $("glance").scrollIntoView({ block: "center" });
    } }, "Use"))));
  return h("table", {},
    h("caption", {}, "dp, pp, cp, tp, ep: ranks along the axes, 1 where it is not said; m: micro-batches; v: chunks of a rank; >=: the step takes at least as long, but the plan (red) does not fit"),
    h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, rows));
}

// ---- at the beginning

show(answer);
forget();
if (Object.keys(usual).some((name) => values[name] !== usual[name])) draw(values);
