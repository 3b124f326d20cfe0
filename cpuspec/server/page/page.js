// A chat over this server's /v1/chat/completions. Text becomes text nodes and nothing else, whatever a model writes.

const $ = (id) => document.getElementById(id);

function make(tag, properties, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

function say(text) {
  $("status").textContent = text;
}

// What the browser keeps: settings, the names of levels in the order of their colours, the list of conversations, and each of them.
const kept = {
  read(name, otherwise) {
    try {
      return JSON.parse(localStorage.getItem(`cpuspec.${name}`)) ?? otherwise;
    } catch {
      return otherwise;
    }
  },
  write(name, value) {
    try {
      localStorage.setItem(`cpuspec.${name}`, JSON.stringify(value));
    } catch {
      say("This browser keeps no more; delete a conversation.");
    }
  },
  remove(name) {
    try {
      localStorage.removeItem(`cpuspec.${name}`);
    } catch {
      // Nothing is kept in this browser at all.
    }
  },
};

const settings = { system: "", temperature: "", top_p: "", max_tokens: "", max_draft_tokens: "", draft: "auto", tint: true, ...kept.read("settings", {}) };
const levels = kept.read("levels", []);
let current = newConversation();
let running = null; // { conversation, message, view, stop } while an answer is computed
let key = "";
try {
  key = sessionStorage.getItem("cpuspec.key") ?? "";
} catch {
  // Nor for a tab.
}

// Conversations

function newConversation() {
  return { id: `${Date.now()}-${Math.random().toString(36).slice(2, 8)}`, title: "New conversation", messages: [] };
}

function save(conversation) {
  const list = kept.read("conversations", []).filter((one) => one.id !== conversation.id);
  kept.write(`conversation.${conversation.id}`, conversation);
  kept.write("conversations", [{ id: conversation.id, title: conversation.title }, ...list]);
  showList();
}

function showList() {
  const rows = kept.read("conversations", []).map((one) => {
    const open = make("button", { type: "button", className: "open", textContent: one.title, onclick: () => openConversation(one.id) });
    const remove = make("button", { type: "button", className: "delete", textContent: "✕", onclick: () => removeConversation(one) });
    remove.setAttribute("aria-label", `Delete ${one.title}`);
    const row = make("li", {}, open, remove);
    if (one.id === current.id) {
      row.className = "current";
      open.setAttribute("aria-current", "true");
    }
    return row;
  });
  $("conversations").replaceChildren(...rows);
}

function openConversation(id) {
  const found = running?.conversation.id === id ? running.conversation : kept.read(`conversation.${id}`, null);
  current = found && Array.isArray(found.messages) ? found : newConversation();
  kept.write("current", current.id);
  showConversation();
  closeMenu();
  $("input").focus();
}

function removeConversation(one) {
  if (!confirm(`Delete “${one.title}”?`)) return;
  if (running?.conversation.id === one.id) running.stop("deleted");
  kept.write("conversations", kept.read("conversations", []).filter((other) => other.id !== one.id));
  kept.remove(`conversation.${one.id}`);
  if (current.id === one.id) openConversation("");
  else showList();
}

function showConversation() {
  $("title").textContent = current.title;
  document.title = current.messages.length ? `${current.title} · cpuspec` : "cpuspec";
  const welcome = make("p", { className: "welcome", textContent: "Ask the model. What you write goes to this server and nowhere else." });
  const nodes = current.messages.map((one) => (one === running?.message ? running.view.node : showMessage(one).node));
  $("log").replaceChildren(...(nodes.length ? nodes : [welcome]));
  $("log").scrollTop = $("log").scrollHeight;
  $("live").hidden = running?.conversation !== current;
  showList();
}

// Messages

function levelNumber(level) {
  if (!levels.includes(level)) {
    levels.push(level);
    kept.write("levels", levels);
  }
  return (levels.indexOf(level) % 6) + 1;
}

// Paragraphs and fenced code, built as the text comes. A line is held back while it may still become a fence.
class Markdown {
  constructor(into) {
    this.into = into;
    this.place = null; // where text goes: a paragraph or a code block
    this.fence = 0; // backticks that opened the code block
    this.held = [];
    this.atStart = true;
  }

  push(level, text) {
    for (const part of text.split(/(?<=\n)/)) {
      if (!this.atStart) {
        this.write(level, part);
        this.atStart = part.endsWith("\n");
        continue;
      }
      this.held.push([level, part]);
      const line = this.held.map((one) => one[1]).join("");
      if (!/^ {0,3}(`{0,2}|`{3,}[^`\n]*)$/.test(line)) this.decide(line);
    }
  }

  finish() {
    const line = this.held.map((one) => one[1]).join("");
    if (line) this.decide(line);
  }

  decide(line) {
    const [, ticks, info] = /^ {0,3}(`{3,})([^`\n]*)\n?$/.exec(line) ?? [];
    if (ticks && !this.fence) {
      this.open(ticks.length, info.trim());
    } else if (ticks && ticks.length >= this.fence && !info.trim()) {
      this.place = null;
      this.fence = 0;
    } else if (!this.fence && !line.trim()) {
      this.place = null;
    } else {
      for (const [level, text] of this.held) this.write(level, text);
      this.atStart = line.endsWith("\n");
    }
    this.held = [];
  }

  open(fence, language) {
    const code = make("code", {});
    const copy = make("button", { type: "button", textContent: "Copy", onclick: () => copyText(code, copy) });
    copy.setAttribute("aria-label", "Copy the code");
    const block = make("pre", { tabIndex: 0 }, code);
    this.into.append(make("div", { className: "block" }, make("div", {}, make("span", { textContent: language || "code" }), copy), block));
    this.place = code;
    this.fence = fence;
  }

  write(level, text) {
    if (!this.place) {
      this.place = make("p", {});
      this.into.append(this.place);
    }
    const last = this.place.lastChild;
    const name = level ?? "";
    if (last && last.dataset.level === name) {
      last.firstChild.appendData(text);
      return;
    }
    const span = make("span", {}, text);
    span.dataset.level = name;
    if (level) {
      span.className = `l${levelNumber(level)}`;
      span.title = `drafted by ${level}`;
    }
    this.place.append(span);
  }
}

async function copyText(node, button) {
  try {
    await navigator.clipboard.writeText(node.textContent);
  } catch {
    // A page that did not come over https or from this machine may only copy what is selected.
    getSelection().selectAllChildren(node);
    document.execCommand("copy");
  }
  button.textContent = "Copied";
  say("Copied");
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

function textOf(message) {
  return message.role === "user" ? message.text : message.runs.map((run) => run[1]).join("");
}

function showMessage(message) {
  const body = make("div", { className: "body" });
  const under = make("div", { className: "under" });
  const node = make("article", { className: `message ${message.role}` }, make("h2", { textContent: message.role === "user" ? "You" : "Model" }), body);
  if (message.role === "user") {
    body.textContent = message.text;
    return { node };
  }
  node.append(under);
  const view = { node, body, under, answer: make("div", {}), reasoning: null, pending: [], painting: 0 };
  view.markdown = new Markdown(view.answer);
  body.append(view.answer);
  if (message.reasoning) addReasoning(view, message.reasoning);
  for (const [level, text] of message.runs) view.markdown.push(level, text);
  if (message.ended) showEnd(view, message);
  return view;
}

function addReasoning(view, text) {
  if (!view.reasoning) {
    view.reasoning = make("p", {});
    view.body.prepend(make("details", { open: true }, make("summary", { textContent: "Reasoning" }), make("div", {}, view.reasoning)));
  }
  view.reasoning.append(text);
}

function showEnd(view, message) {
  view.markdown.finish();
  view.body.removeAttribute("aria-busy");
  if (message.error) {
    const notice = make("p", { className: "notice", textContent: message.error });
    notice.setAttribute("role", "alert");
    view.node.insertBefore(notice, view.under);
  }
  const copy = make("button", { type: "button", textContent: "Copy", onclick: () => copyText(view.answer, copy) });
  const again = make("button", { type: "button", className: "again", textContent: "Try again", onclick: () => tryAgain(message) });
  copy.setAttribute("aria-label", "Copy the answer");
  view.under.replaceChildren(...(message.figures ?? []).map((text) => make("span", { textContent: text })), ...(textOf(message) ? [copy] : []), again);
}

function tryAgain(message) {
  if (running || current.messages.at(-1) !== message) return;
  current.messages.pop();
  showConversation();
  answer();
}

// Figures while an answer comes

class Meter {
  constructor() {
    this.begin = performance.now();
    this.tokens = this.drafted = this.accepted = 0;
    this.byLevel = new Map();
    this.rounds = [];
    this.shown = 0;
    $("live").hidden = $("figures").hidden = false;
    for (const id of ["speed", "acceptance", "decision"]) $(id).textContent = "";
    $("rounds").replaceChildren();
    $("legend").replaceChildren();
    this.progress(null);
  }

  progress(found) {
    this.prompt = found;
    $("prompt-progress").hidden = false;
    if (found) $("progress").value = found.processed / found.total;
    else $("progress").removeAttribute("value");
    const cached = found?.cache ? `, ${found.cache} of them from the cache` : "";
    $("progress-label").textContent = found ? `Reading the prompt: ${found.processed} of ${found.total} tokens${cached}` : "Reading the prompt";
  }

  token({ level, rounds }) {
    this.last = performance.now();
    this.first ??= this.last;
    this.tokens += 1;
    if (level) this.byLevel.set(level, (this.byLevel.get(level) ?? 0) + 1);
    for (const round of rounds ?? []) {
      this.drafted += round.drafted;
      this.accepted += round.accepted;
      this.rounds.push(round);
    }
    if (this.last - this.shown > 200) this.show();
  }

  get rate() {
    return this.last > this.first ? (1000 * (this.tokens - 1)) / (this.last - this.first) : 0;
  }

  show() {
    this.shown = performance.now();
    if (!this.tokens) return;
    $("prompt-progress").hidden = true;
    $("speed").textContent = `${this.tokens} tokens${this.rate ? `, ${this.rate.toFixed(1)} tokens/s` : ""}`;
    $("acceptance").textContent = acceptance(this.accepted, this.drafted);
    const latest = this.rounds.at(-1);
    if (latest) $("decision").textContent = latest.drafted ? `latest: ${latest.level} drafted ${latest.drafted}, ${latest.accepted} accepted` : "latest: no draft";
    const recent = this.rounds.slice(-64);
    const most = Math.max(4, ...recent.map((round) => round.drafted));
    $("rounds").replaceChildren(...recent.map((round) => roundBar(round, most)));
    $("legend").replaceChildren(
      ...[...this.byLevel].map(([level, number]) => make("li", { className: `l${levelNumber(level)}`, textContent: `${level} ${number}` })),
      make("li", { textContent: `target ${this.tokens - [...this.byLevel.values()].reduce((sum, one) => sum + one, 0)}` }),
    );
  }

  figures(timings) {
    const found = [`${this.tokens} tokens`];
    const rate = timings ? timings.predicted_per_second : this.rate;
    if (rate) found.push(`${rate.toFixed(1)} tokens/s`);
    if (this.first) found.push(`first after ${((this.first - this.begin) / 1000).toFixed(2)} s`);
    if (timings?.cache_n) found.push(`${timings.cache_n} of ${timings.cache_n + timings.prompt_n} prompt tokens cached`);
    if (this.drafted) found.push(acceptance(this.accepted, this.drafted));
    return found;
  }
}

function acceptance(accepted, drafted) {
  return drafted ? `${accepted} of ${drafted} drafted tokens accepted (${Math.round((100 * accepted) / drafted)} %)` : "";
}

function roundBar(round, most) {
  // A draft of several levels has no colour of its own: its tokens have theirs.
  const bar = make("i", { className: levels.includes(round.level) ? `r${levelNumber(round.level)}` : "", title: round.drafted ? `${round.level}: ${round.accepted} of ${round.drafted}` : "no draft" });
  if (round.drafted) {
    const [rejected, accepted] = [make("b", {}), make("s", {})];
    rejected.style.height = `${(90 * (round.drafted - round.accepted)) / most}%`;
    accepted.style.height = `${(90 * round.accepted) / most}%`;
    bar.append(rejected, accepted);
  }
  return bar;
}

// Requests

function headers() {
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

async function errorText(response) {
  if (response.status === 401) return "The API key is missing or wrong. Give the right one in the settings.";
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let rested = performance.now();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    if (performance.now() - rested > 30) {
      // Where tokens come faster than they are shown, keys and the button to stop have their turn.
      await new Promise((resume) => setTimeout(resume));
      rested = performance.now();
    }
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue; // a sign that the server lives
      const data = part.slice(6);
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function requestBody(conversation) {
  const told = conversation.messages.map((one) => ({ role: one.role, content: textOf(one) })).filter((one) => one.content);
  const body = {
    messages: settings.system ? [{ role: "system", content: settings.system }, ...told] : told,
    stream: true,
    return_progress: true,
    cpuspec: { tokens: true },
    speculation: { draft: settings.draft },
  };
  if ($("model").value) body.model = $("model").value;
  for (const name of ["temperature", "top_p", "max_tokens"]) if (settings[name] !== "") body[name] = Number(settings[name]);
  if (settings.max_draft_tokens !== "") body.speculation.max_draft_tokens = Number(settings.max_draft_tokens);
  return body;
}

async function answer() {
  const conversation = current;
  const controller = new AbortController();
  const body = requestBody(conversation);
  const message = { role: "assistant", runs: [], reasoning: "" };
  const view = showMessage(message);
  view.body.setAttribute("aria-busy", "true");
  conversation.messages.push(message);
  running = { conversation, message, view, stop: (why) => controller.abort(why) };
  showRunning();
  showConversation();
  say("The model answers");
  const meter = new Meter();
  let timings = null;
  let reason = null;
  try {
    const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(body), signal: controller.signal });
    if (!response.ok) throw new Error(await errorText(response));
    for await (const chunk of events(response.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.prompt_progress) meter.progress(chunk.prompt_progress);
      const level = chunk.cpuspec ? chunk.cpuspec.level : null;
      if (chunk.cpuspec) meter.token(chunk.cpuspec);
      timings = chunk.timings ?? timings;
      for (const choice of chunk.choices) {
        reason = choice.finish_reason ?? reason;
        if (choice.delta.content || choice.delta.reasoning_content) add(message, view, level, choice.delta);
      }
    }
    if (!reason) throw new Error("The connection broke off before the answer's end.");
  } catch (error) {
    reason = controller.signal.aborted ? "stopped" : "error";
    if (reason === "error") message.error = error instanceof TypeError ? "The server cannot be reached." : error.message;
  }
  meter.show();
  $("prompt-progress").hidden = $("figures").hidden = true; // the figures now stand under the answer
  message.figures = [...meter.figures(timings), ...({ stopped: ["stopped"], length: ["cut off by the limit of tokens"] }[reason] ?? [])];
  message.ended = true;
  running = null;
  paint(view);
  showEnd(view, message);
  paint(view);
  showRunning();
  if (controller.signal.reason !== "deleted") save(conversation);
  $("live").hidden = conversation !== current || !meter.tokens;
  say({ stopped: "Stopped", error: "" }[reason] ?? `The answer is complete: ${message.figures.join(", ")}`);
}

function add(message, view, level, delta) {
  if (delta.reasoning_content) {
    message.reasoning += delta.reasoning_content;
    view.pending.push(() => addReasoning(view, delta.reasoning_content));
  }
  if (delta.content) {
    const last = message.runs.at(-1);
    if (last && last[0] === level) last[1] += delta.content;
    else message.runs.push([level, delta.content]);
    view.pending.push(() => view.markdown.push(level, delta.content));
  }
  view.painting ||= setTimeout(() => paint(view), 40);
}

// Show what has come since the last time: a layout for each token would take the processor from the model.
function paint(view) {
  clearTimeout(view.painting);
  view.painting = 0;
  const log = $("log");
  const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  for (const show of view.pending) show();
  view.pending = [];
  if (follows) log.scrollTop = log.scrollHeight;
}

function titleOf(text) {
  const line = text.split("\n")[0];
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
}

function send() {
  const text = $("input").value.trim();
  if (!text || running) return;
  if (!current.messages.length) current.title = titleOf(text);
  current.messages.push({ role: "user", text });
  kept.write("current", current.id);
  save(current);
  $("input").value = "";
  fit();
  $("input").focus();
  answer();
}

function showRunning() {
  $("send").hidden = Boolean(running);
  $("stop").hidden = !running;
}

// The server's model and its own choices, shown where a field is empty

async function ask(path) {
  const response = await fetch(path, { headers: headers() });
  if (!response.ok) throw Object.assign(new Error(await errorText(response)), { status: response.status });
  return response.json();
}

async function meet() {
  try {
    const [models, props] = await Promise.all([ask("v1/models"), ask("props")]);
    const before = $("model").value;
    $("model").replaceChildren(...models.data.map((one) => make("option", { value: one.id, textContent: one.id })));
    if (models.data.some((one) => one.id === before)) $("model").value = before;
    const own = props.default_generation_settings.params;
    for (const name of ["temperature", "top_p"]) $(name).placeholder = own[name] ?? "";
    $("draft").options[0].textContent = `as the server was started: ${props.draft}`;
    if ($("status").textContent.startsWith("The model is being loaded")) say("Ready");
    $("notice")?.remove();
  } catch (error) {
    const notice = $("notice") ?? make("p", { id: "notice", className: "notice" });
    notice.setAttribute("role", "alert");
    notice.textContent = error.status ? error.message : "The server cannot be reached.";
    if (!notice.isConnected) $("composer").before(notice);
    if (error.status !== 401) setTimeout(meet, 2000);
  }
}

// Controls

function closeMenu() {
  $("sidebar").classList.remove("shown");
  $("shade").hidden = true;
  $("menu").setAttribute("aria-expanded", "false");
}

function fit() {
  const input = $("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

function begin() {
  for (const name of ["system", "temperature", "top_p", "max_tokens", "max_draft_tokens", "draft"]) {
    $(name).value = settings[name];
    $(name).addEventListener("change", () => {
      if (!$(name).reportValidity()) return;
      settings[name] = $(name).value;
      kept.write("settings", settings);
    });
  }
  const tint = () => document.body.classList.toggle("plain", !settings.tint);
  $("tint").checked = settings.tint;
  $("tint").addEventListener("change", () => {
    settings.tint = $("tint").checked;
    kept.write("settings", settings);
    tint();
  });
  tint();
  $("key").value = key;
  $("key").addEventListener("change", () => {
    key = $("key").value.trim();
    try {
      sessionStorage.setItem("cpuspec.key", key);
    } catch {
      // The key is known until the page is left.
    }
    meet();
  });
  $("settings-open").addEventListener("click", () => $("settings").showModal());
  $("menu").addEventListener("click", () => {
    $("sidebar").classList.add("shown");
    $("shade").hidden = false;
    $("menu").setAttribute("aria-expanded", "true");
    $("new").focus();
  });
  $("shade").addEventListener("click", closeMenu);
  $("new").addEventListener("click", () => openConversation(""));
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("stop").addEventListener("click", () => {
    running?.stop("stopped");
    $("input").focus();
  });
  $("input").addEventListener("input", fit);
  $("input").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.isComposing || $("settings").open) return;
    if ($("sidebar").classList.contains("shown")) {
      closeMenu();
      $("menu").focus();
    } else {
      running?.stop("stopped");
    }
  });
  addEventListener("pagehide", () => running && save({ ...running.conversation, messages: running.conversation.messages.map((one) => ({ ...one, ended: true })) }));
  addEventListener("storage", showList);
  openConversation(kept.read("current", ""));
  meet();
}

begin();
