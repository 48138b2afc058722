// Reads the ledger every other second, and shows it. Whatever comes from the ledger becomes text,
// by textContent: never HTML.
"use strict";

const EVERY_MS = 2000;
const at = (id) => document.getElementById(id);
const field = (form, name) => at(form).elements[name].value.trim();
const number = (value) => (value === null || value === undefined ? "-" : value.toLocaleString("en"));
const clock = (ms) => (ms ? moment(ms) : "-");

function chosen() {
  try {
    return decodeURIComponent(location.hash.slice(1));
  } catch {
    return "";
  }
}

function moment(ms) {
  const time = new Date(ms);
  return isNaN(time) ? `${ms} ms` : time.toISOString().replace("T", " ").replace("Z", "");
}

function element(tag, text, kind) {
  const made = document.createElement(tag);
  if (text instanceof Node) made.append(text);
  else made.textContent = text === null || text === undefined || text === "" ? "-" : String(text);
  if (kind) made.className = kind;
  return made;
}

// A table's columns are [heading, class, function of a row]; a function may return a node. `more`: how
// many rows are left out.
function fill(table, columns, rows, none, more = 0) {
  const head = element("tr", document.createDocumentFragment());
  for (const [heading, kind] of columns) head.append(element("th", heading, kind === "n" ? "n" : ""));
  const lines = rows.map((row) => {
    const line = element("tr", document.createDocumentFragment());
    for (const [, kind, cell] of columns) line.append(element("td", cell(row), kind));
    return line;
  });
  if (more || !rows.length) {
    const line = element("tr", element("td", more ? `${number(more)} more` : none, "soft"));
    line.firstChild.colSpan = columns.length;
    lines.push(line);
  }
  table.replaceChildren(head, ...lines);
}

async function ask(what, query) {
  const answer = await fetch(`api/${what}?${new URLSearchParams(query)}`, { cache: "no-store" });
  if (!answer.ok) throw new Error((await answer.text()).trim() || `status ${answer.status}`);
  return answer.json();
}

function say(place, text, bad) {
  at(place).textContent = text;
  at(place).className = bad ? "bad" : "soft";
}

// ---- the ledger --------------------------------------------------------------------------

let ends = new Map(); // topic -> [next offset, time], of the answer before

function rate(topic, time) {
  const [before, when] = ends.get(topic.name) || [topic.next, time];
  return time > when ? ((topic.next - before) * 1000) / (time - when) : 0;
}

function opener(topic) {
  const button = element("button", topic.name);
  button.type = "button";
  button.addEventListener("click", () => { location.hash = encodeURIComponent(topic.name); });
  return button;
}

function showLedger(found) {
  at("path").textContent = found.path;
  document.title = `${found.path} - exclusivelog`;
  const tiles = [
    [found.topic_count, "topics"], [found.engine_count, "engines"], [found.waiters, "waiters"],
    [found.used_bytes, "bytes of tables"],
    [found.findings.length, "findings", found.findings.length ? "bad" : "good"],
  ];
  at("tiles").replaceChildren(...tiles.map(([value, name, kind]) => {
    const tile = element("div", document.createDocumentFragment(), `tile ${kind || ""}`);
    tile.append(element("b", number(value)), element("span", name));
    return tile;
  }));
  at("findings").hidden = !found.findings.length;
  at("findings").querySelector("ul").replaceChildren(...found.findings.map((text) => element("li", text)));
  showTopics(found);
  at("locks").hidden = !found.roles.length;
  fill(at("roles"), [
    ["lock or role", "name", (row) => row.role], ["epoch", "n", (row) => number(row.epoch)],
    ["holder", "name", (row) => row.holder], ["waiters", "n", (row) => number(row.waiters)],
    ["queue", "name", (row) => queued(row)],
  ], found.roles, "none", found.more.roles);
  fill(at("events"), [
    ["time", "", (row) => clock(row.time)], ["what", "name", (row) => row.what],
    ["kind", "", (row) => row.kind], ["reason", "", (row) => row.reason], ["epoch", "n", (row) => row.epoch],
    ["from", "name", (row) => row.from], ["to", "name", (row) => row.to],
  ], found.events, "none so far");
  fill(at("engines"), [
    ["engine", "name", (row) => row.name], ["id", "", (row) => row.id], ["pid", "n", (row) => row.pid],
    ["heartbeat", "n", (row) => `${row.heartbeat_age} s ago`], ["properties", "name", (row) => row.properties],
  ], found.engines, "no program has the ledger open to write", found.more.engines);
  at("readers").hidden = !found.groups.length;
  fill(at("groups"), [
    ["group", "name", (row) => row.group], ["topic", "name", (row) => row.topic],
    ["position", "n", (row) => number(row.position)], ["lag", "n", (row) => number(row.lag)],
    ["reader", "name", (row) => (row.engine === null ? "-" : `${row.engine} (pid ${row.pid})`)],
  ], found.groups, "none", found.more.groups);
}

function queued(row) {
  const hidden = row.waiters - row.queue.length;
  return [...row.queue, ...(hidden ? [`${number(hidden)} more`] : [])].join(", ");
}

function showTopics(found) {
  const hidden = found.found_count - found.topics.length;
  say("found", hidden > 0 ? `${number(found.found_count)} topics, ${number(hidden)} of them not shown` : "");
  fill(at("topics"), [
    ["topic", "name", opener], ["kind", "", (row) => row.kind],
    ["messages", "n", (row) => number(row.next - row.first)],
    ["per second", "n", (row) => number(Math.round(rate(row, found.time)))],
    ["epoch", "n", (row) => number(row.epoch)], ["owner", "name", (row) => row.owner],
    ["waiters", "n", (row) => number(row.waiters)],
    ["hand-overs", "n", (row) => number(row.moving)], ["lag", "n", (row) => number(row.lag)],
  ], found.topics, "none");
  ends = new Map(found.topics.map((row) => [row.name, [row.next, found.time]]));
}

// ---- a topic -----------------------------------------------------------------------------

let live = true; // shows the latest messages, as they come
let next = null; // where a search goes on

async function showTopic(name) {
  const found = await ask("topic", { topic: name });
  if (name !== chosen()) return;
  at("name").textContent = found.name;
  say("facts", `${found.kind}, offsets ${number(found.first)} to ${number(found.next)}`);
  at("map").hidden = found.kind !== "map";
  fill(at("owners"), [
    ["state", "", (row) => row.state], ["producer", "name", (row) => row.producer],
    ["mode", "", (row) => row.mode], ["priority", "n", (row) => row.priority], ["epoch", "n", (row) => row.epoch],
    ["engine", "name", (row) => row.engine], ["pid", "n", (row) => row.pid],
    ["since", "", (row) => (row.until ? `until ${clock(row.until)}` : clock(row.since))],
  ], found.owners, "no owner, and no waiter", found.more);
  at("topic").hidden = false;
}

function shown(part) {
  if (part === null) return "(none)";
  if (part.bytes === 0) return "(empty)";
  return part.cut ? `${part.text}\u2026 (${number(part.bytes)} bytes)` : part.text;
}

async function showMessages(name, query) {
  const found = await ask("messages", { topic: name, ...query });
  if (name !== chosen()) return;
  next = found.more ? found.next : null;
  at("on").hidden = live || next === null;
  const place = `before offset ${number(found.next)} of ${number(found.end)}`;
  say("searched", live ? "the latest messages, live" : `${found.messages.length} messages ${place}`);
  fill(at("messages"), [
    ["offset", "n", (row) => row.offset], ["epoch", "n", (row) => row.epoch], ["time", "", (row) => clock(row.time)],
    ["producer", "name", (row) => row.producer],
    ["key", "value", (row) => (row.key === null ? "-" : shown(row.key))],
    ["value", "value", (row) => shown(row.value)], ["properties", "name", (row) => row.properties],
  ], live ? found.messages.reverse() : found.messages, "none");
}

async function showMap(name, query) {
  say("keys", "Reading\u2026");
  const found = await ask("map", { topic: name, ...query });
  if (name !== chosen()) return;
  say("keys", `${number(found.found)} of ${number(found.count)} keys, at offset ${number(found.at)}`);
  fill(at("entries"), [
    ["key", "value", (row) => shown(row.key)], ["value", "value", (row) => shown(row.value)],
    ["expires", "", (row) => clock(row.expires)],
  ], found.entries, "none");
}

// ---- what the user does --------------------------------------------------------------------

function asks(form, place, show) {
  at(form).addEventListener("submit", (event) => {
    event.preventDefault();
    show().catch((error) => say(place, error.message, true));
  });
}

function search(from) {
  live = false;
  return showMessages(chosen(), { from, key: field("search", "key") });
}

function open() {
  live = true;
  next = null;
  at("topic").hidden = true;
  at("search").reset();
  at("past").reset();
  at("entries").replaceChildren();
  say("keys", "");
  refresh();
}

asks("search", "searched", () => search(field("search", "from") || "earliest"));
asks("past", "keys", () => showMap(chosen(), { at: field("past", "at").replace(/^now$/, ""), prefix: field("past", "prefix") }));
asks("filter", "found", refresh);
at("filter").addEventListener("input", () => refresh());
at("on").addEventListener("click", () => {
  search(String(next)).catch((error) => say("searched", error.message, true));
});
at("latest").addEventListener("click", () => { live = true; at("search").reset(); refresh(); });
addEventListener("hashchange", open);

// ---- again and again -----------------------------------------------------------------------

let asked = 0; // answers that were overtaken by later ones are not shown

async function refresh() {
  const turn = ++asked;
  try {
    const found = await ask("ledger", { filter: field("filter", "filter") });
    if (turn !== asked) return;
    showLedger(found);
    const name = chosen();
    if (name) {
      await showTopic(name);
      if (live) await showMessages(name, {});
    }
    say("status", `as of ${clock(found.time)}`);
  } catch (error) {
    if (turn === asked) say("status", error instanceof TypeError ? "the server has ended" : error.message, true);
  }
}

async function follow() {
  if (!document.hidden) await refresh();
  setTimeout(follow, EVERY_MS);
}
follow();
