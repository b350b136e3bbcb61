// What went wrong: a mistake of the register, what moves and what sees it; and ranks that wait.

import { $, ask, first, h, latest, onServer, say, state, svg } from "./page.js";

const FIRST = first().answer;
const CHECKS = ["it ends", "losses", "gradients", "ranks agree", "bytes"];
const HEADS = ["It ends", "Losses as they should be", "Gradients equal one device's", "Ranks agree", "Bytes as they should be"];
const answers = new Map([[FIRST.mistake, FIRST], [FIRST.waits.program, FIRST.waits]]);

// ---- a mistake

function cells(row) {
  const ok = (good, words) => h("td", {}, h("span", { class: good ? "muted" : "red" }, `${good ? "✓" : "✗"} ${words}`));
  if (row.error) {
    const [name, ...more] = row.error.split(": "), words = more.join(": ").replace("every rank waits:\n", "").trim();
    return [ok(false, name), h("td", { colspan: 4, class: "muted" }, words.length > 130 ? `${words.slice(0, 130)} …` : words)];
  }
  const [moved, right] = row.bytes;
  return [
    ok(true, "yes"),
    row.losses === null ? h("td", { class: "muted" }, "not compared") : ok(row.losses, row.losses ? "right" : "wrong"),
    ok(!row.wrong, row.wrong ? `${row.wrong} of ${row.all} wrong` : `${row.all} right`),
    ok(row.agree, row.agree ? "yes" : "no"),
    ok(moved === right, moved === right ? "yes" : `${moved.toLocaleString("en")}, not ${right.toLocaleString("en")}`),
  ];
}

function table(rows) {
  const head = ["Strategy", "Case", "Ranks", ...HEADS].map((name) => h("th", { scope: "col" }, name));
  let before = "";
  const body = rows.map((row) => {
    const name = row.strategy === before ? "" : row.strategy;
    before = row.strategy;
    return h("tr", { class: row.seen.length ? "" : "muted" }, h("td", {}, name && h("b", {}, name)), h("td", {}, row.case), h("td", { class: "number" }, String(row.ranks)), ...cells(row));
  });
  return h("table", {}, h("thead", {}, h("tr", {}, ...head)), h("tbody", {}, ...body));
}

const number = (x) => (x === null ? "no ratio" : Math.abs(x) >= 1000 || (x && Math.abs(x) < 0.001) ? x.toExponential(1) : String(Number(x.toPrecision(3))));

// A line per gradient: from 1, where it should be, to its factor.
function gradients(row) {
  const known = row.worst.map((one) => one.factor).filter((x) => x !== null);
  const low = Math.max(-3, Math.min(0, ...known)), high = Math.min(8, Math.max(2, ...known));
  const left = 180, width = 520, x = (value) => left + ((Math.min(high, Math.max(low, value)) - low) / (high - low)) * 170;
  const tall = 34 + row.worst.length * 26;
  const words = row.worst.map((one) => `${one.name} ${one.fault || `times ${number(one.factor)}`}`).join(", ");
  const picture = svg("svg", { viewBox: `0 0 ${width} ${tall}`, role: "img", "aria-label": words });
  picture.style.minWidth = "26rem";
  for (const [value, name] of [[0, "0"], [1, "as it should be"]]) {
    picture.append(
      svg("line", { x1: x(value), x2: x(value), y1: 20, y2: tall, stroke: value ? "var(--good)" : "var(--border)", "stroke-width": value ? 2 : 1 }),
      svg("text", { x: x(value), y: 13, "text-anchor": "middle" }, value || x(1) - x(0) > 55 ? name : ""));
  }
  row.worst.forEach((one, i) => {
    const y = 36 + i * 26, end = one.factor === null ? null : x(one.factor);
    picture.append(svg("text", { x: left - 12, y: y + 4, "text-anchor": "end" }, one.name.length > 26 ? `…${one.name.slice(-25)}` : one.name));
    if (end !== null) {
      picture.append(
        svg("line", { x1: x(1), x2: end, y1: y, y2: y, stroke: "var(--fault)", "stroke-width": 4 }),
        svg("circle", { cx: end, cy: y, r: 6, fill: "var(--fault)" }));
    }
    const error = one.error === null ? "" : `, error ${one.error.toExponential(1)}`;
    picture.append(svg("text", { x: 368, y: y + 4 }, one.fault || `× ${number(one.factor)}${error}`));
  });
  return picture;
}

function show(answer) {
  $("title").textContent = answer.title;
  $("symptom").textContent = `What you would see: ${answer.symptom}.`;
  $("seen").textContent = `Where it was seen: ${answer.seen}.`;
  const row = answer.rows.find((one) => one.worst), stuck = answer.rows.find((one) => one.error);
  const last = answer.diagnosis && `The test that finds it says, in part: “${answer.diagnosis}”.`;
  $("sees").replaceChildren(answer.sees, h("br"), (row?.cause && `minidist verify: ${row.cause}.`) || last || "");
  $("gradients").replaceChildren(row ? gradients(row) : h("pre", { class: "fault" }, stuck ? stuck.error : "No gradient moves in these cases."));
  $("caption").textContent = row
    ? `${row.strategy}, ${row.case}, on ${row.ranks} ranks: the ${row.worst.length} most wrong of ${row.wrong} wrong gradients, on the first rank where they are wrong. A dot is the gradient's factor: what the ranks have, divided by what is right (the median of its numbers). Error: the largest difference, divided by the largest right number.`
    : stuck ? `${stuck.strategy}, ${stuck.case}, on ${stuck.ranks} ranks: what ended the run.` : "";
  $("diff").replaceChildren(...answer.diff.split("\n").slice(2).map((line) =>
    h("span", { class: line[0] === "+" ? "plus" : line[0] === "-" ? "minus" : "" }, `${line}\n`)));
  $("diff").prepend(`${answer.diff.split("\n")[1].slice(6)}\n`);
  $("rows").replaceChildren(table(answer.rows));
  $("text").textContent = [answer.title, answer.symptom, answer.seen, answer.sees, ...answer.rows.map((one) =>
    `${one.strategy}, ${one.case}, ${one.ranks} ranks: ${one.error || `${one.wrong} of ${one.all} gradients are wrong`}; seen by ${one.seen.join(", ") || "nothing"}`)].join("\n");
}

// ---- ranks that wait

function graph(step, raised) {
  const n = step.ranks.length, picture = svg("svg", { viewBox: "0 0 460 300", role: "img" });
  const at = (r) => [230 + 150 * Math.sin((2 * Math.PI * r) / n), 150 - 100 * Math.cos((2 * Math.PI * r) / n)];
  const head = (id, colour) => svg("marker", { id, viewBox: "0 0 10 10", refX: 9, refY: 5, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse" }, svg("path", { d: "M0 0L10 5L0 10z", fill: colour }));
  picture.append(svg("defs", {}, head("wait", "var(--muted)"), head("never", "var(--fault)")));
  step.ranks.forEach((one, r) => one.for.forEach((other) => {
    const [x1, y1] = at(r), [x2, y2] = at(other), long = Math.hypot(x2 - x1, y2 - y1), red = step.lit.some(([a, b]) => a === r && b === other);
    const [dx, dy] = [((x2 - x1) / long) * 40, ((y2 - y1) / long) * 40], [nx, ny] = [(y1 - y2) / long * 18, (x2 - x1) / long * 18];
    picture.append(svg("path", {
      d: `M${x1 + dx} ${y1 + dy}Q${(x1 + x2) / 2 + nx} ${(y1 + y2) / 2 + ny} ${x2 - dx} ${y2 - dy}`, fill: "none",
      stroke: red ? "var(--fault)" : "var(--muted)", "stroke-width": red ? 3.5 : 2, "marker-end": `url(#${red ? "never" : "wait"})`,
    }));
  }));
  step.ranks.forEach((one, r) => {
    const [x, y] = at(r), red = step.lit.some(([a]) => a === r), done = one.words === "has finished" && !raised, ended = one.words === "has finished" && raised;
    picture.append(
      svg("circle", { cx: x, cy: y, r: 34, fill: red ? "var(--fault-surface)" : done ? "var(--good-surface)" : "var(--surface)", stroke: red ? "var(--fault)" : r === step.ran ? "var(--link)" : "var(--border)", "stroke-width": r === step.ran || red ? 3 : 1.5 }),
      svg("text", { x, y: y - 2, "text-anchor": "middle" }, `rank ${r}`),
      svg("text", { x, y: y + 13, "text-anchor": "middle", class: "time" }, done ? "finished" : ended ? "ended" : one.for.length ? "waits" : "can go on"));
  });
  picture.setAttribute("aria-label", words(step));
  return picture;
}

const words = (step) => step.ranks.map((one, r) =>
  `rank ${r} ${one.words}${one.for.length ? ` for rank ${one.for.join(" and ")}` : ""}`).join("; ");

function walk(answer, { seed, step }) {
  const one = answer.seeds[Math.min(7, seed)], at = Math.max(0, Math.min(step, one.steps.length - 1)), last = at === one.steps.length - 1;
  const raised = !["finishes", "Deadlock"].includes(one.verdict); // ranks end with an error
  const ended = (each) => ({ ...each, words: "has finished", for: [] });
  const now = raised && last ? { ...one.steps[at], ranks: one.steps[at].ranks.map(ended) } : one.steps[at];
  $("step").max = one.steps.length - 1;
  $("step").value = at;
  $("back").disabled = at === 0;
  $("next").disabled = last;
  const said = `Seed ${seed}, step ${at + 1} of ${one.steps.length}: rank ${now.ran} ran. Now ${words(now)}.`;
  $("now").textContent = raised ? said.replaceAll("has finished", last ? "has ended with an error" : "has ended") : said;
  $("graph").replaceChildren(graph(now, raised));
  $("source").replaceChildren(...answer.source.map((line, i) => {
    const here = Object.entries(now.lines).filter(([, at]) => at === i).map(([rank]) => rank);
    return h("span", { class: here.length ? "here" : "" }, `${here.length ? `▸${here.join(",")}` : ""}`.padEnd(9), `${line}\n`);
  }));
  $("seeds").replaceChildren(h("p", {}, "How each seed ends:"), ...answer.seeds.map((each, i) =>
    h("button", { type: "button", "aria-pressed": String(i === seed), onclick: () => page.set({ seed: i, step: 0 }) }, `seed ${i}: ${each.verdict}`)));
  $("verdict").textContent = last ? `${one.verdict}\n${one.words}` : "Step to the end to see the error of the package.";
  $("verdict").className = `panel ${last ? (one.verdict === "finishes" ? "good" : "fault") : ""}`;
}

// ---- the page

const families = Map.groupBy ? Map.groupBy(FIRST.choices, (one) => one.family) : new Map([["all", FIRST.choices]]);
for (const [family, members] of families) {
  $("choice").append(h("optgroup", { label: family }, ...members.map((one) => h("option", { value: one.name }, one.title))));
}
$("programs").append(...FIRST.programs.map((name) => h("option", { value: name }, name.replaceAll("_", " "))));

const asked = { mistake: latest(ask), program: latest(ask) };
async function get(kind, name) {
  if (answers.has(name)) return answers.get(name);
  if (onServer) say("Real ranks run it: some seconds");
  const found = await asked[kind]({ [kind]: name });
  if (found && !found.error) answers.set(name, found);
  if (found) say(found.error ?? "");
  return found?.error ? null : found;
}

const page = state({ mistake: FIRST.mistake, program: FIRST.waits.program, seed: 0, step: 0 }, update);
async function update(values) {
  get("mistake", values.mistake).then((found) => found && found.mistake === page.values.mistake && show(found));
  get("program", values.program).then((found) => found && found.program === page.values.program && walk(found, page.values));
}

const move = (by) => {
  const names = FIRST.choices.map((one) => one.name), at = names.indexOf(page.values.mistake) + by;
  page.set({ mistake: names[(at + names.length) % names.length] });
};
const step = (by) => page.set({ step: Math.max(0, Math.min(Number($("step").max), Number($("step").value) + by)) });
$("previous").onclick = () => move(-1);
$("following").onclick = () => move(1);
$("back").onclick = () => step(-1);
$("next").onclick = () => step(1);
$("graph").addEventListener("keydown", (event) => {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (by) { event.preventDefault(); step(by); }
});
update(page.values);
