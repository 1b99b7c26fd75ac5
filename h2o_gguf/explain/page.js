"use strict";
(async () => {
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const { texts, nPast, nHead, nPrompt, events } = data;
  const nLayer = data.layers.length;
  const nText = texts.length;

  // -- the arrays -----------------------------------------------------------------------------------------

  const unpacked = async (text) => {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).arrayBuffer();
  };
  // left[pair * nPast + position] : which of the events took the entry; their number where none did
  const left = new (data.leftBytes === 2 ? Uint16Array : Uint32Array)(await unpacked(data.left));
  // for each entry that was away and came back: [when it left, when it came back], oldest first
  const gaps = new Map();
  const gapRows = new Int32Array(await unpacked(data.gaps));
  for (let i = 0; i < gapRows.length; i += 5) {
    const [row, head, position, gone, back] = gapRows.subarray(i, i + 5);
    const entry = (row * nHead + head) * nPast + position;
    gaps.set(entry, [...(gaps.get(entry) ?? []), [gone, back]]);
  }
  const heavyBits = data.heavy === null ? null : new Uint8Array(await unpacked(data.heavy));
  const heavyRow = Math.ceil(nPast / 8);

  const isHeavy = (pair, i) =>
    heavyBits !== null && i < nPast && ((heavyBits[pair * heavyRow + (i >> 3)] >> (7 - (i & 7))) & 1) === 1;

  const chosenPairs = () => {
    const pairs = [];
    for (let row = 0; row < nLayer; row++)
      for (let head = 0; head < nHead; head++)
        if (["all", String(row)].includes($("layer").value) && ["all", String(head)].includes($("head").value))
          pairs.push(row * nHead + head);
    return pairs;
  };

  // how many events there have been after n tokens
  const eventsBy = (n) => {
    let low = 0, high = events.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (events[middle] <= n) low = middle + 1;
      else high = middle;
    }
    return low;
  };

  // -- the text -------------------------------------------------------------------------------------------

  // Blocks end with lines, and long lines are broken with a mark, since a block is laid out and painted whole.
  const BLOCK_TOKENS = 64, LINE_TOKENS = 1000;
  const spans = [];
  const build = () => {
    const all = document.createDocumentFragment();
    let block = null, n = 0;
    for (let i = 0; i < nText; i++) {
      const isBroken = n >= LINE_TOKENS && texts[i].startsWith(" ");
      if (block === null || isBroken || (n >= BLOCK_TOKENS && texts[i - 1].endsWith("\n"))) {
        block?.classList.toggle("goes-on", isBroken);
        block = document.createElement("div");
        block.className = "block";
        block.dir = "auto";
        all.append(block);
        n = 0;
      }
      const span = document.createElement("span");
      span.className = "t";
      span.textContent = texts[i];
      span.index = i;
      spans.push(span);
      block.append(span);
      n++;
    }
    $("text").append(all);
  };

  const READ = 0, GONE = 1, UNREAD = 2;
  const shares = new Float32Array(nText).fill(-1);
  const states = new Uint8Array(nText).fill(255);
  let pairs = [], counts = new Uint32Array(nPast), recalls = new Uint32Array(nPast), nRead = nPast;

  const shade = () => {
    nRead = Number($("time").value);
    $("now").value = nRead.toLocaleString("en");
    const code = eventsBy(nRead);
    counts.fill(0);
    for (const pair of pairs) {
      const start = pair * nPast;
      for (let i = 0; i < nRead; i++) if (left[start + i] >= code) counts[i]++;
    }
    recalls.fill(0);
    const chosen = new Set(pairs);
    for (const [entry, times] of gaps) {
      const i = entry % nPast;
      if (i >= nRead || left[entry] < code || !chosen.has((entry - i) / nPast)) continue;
      if (times.some(([gone, back]) => gone <= nRead && nRead < back)) counts[i]--;
      else if (times.some(([, back]) => back <= nRead)) recalls[i]++;
    }
    const least = leastMarked();
    for (let i = 0; i < nText; i++) {
      const share = i < nRead ? counts[i] / pairs.length : 0;
      const state = i >= nRead ? UNREAD : share === 0 ? GONE : READ;
      if (shares[i] !== Math.fround(share)) {
        shares[i] = share;
        spans[i].style.setProperty("--s", share.toFixed(3));
      }
      if (states[i] !== state) {
        states[i] = state;
        spans[i].classList.toggle("gone", state === GONE);
        spans[i].classList.toggle("unread", state === UNREAD);
      }
      const isRecalled = i < nPast && recalls[i] >= least;
      spans[i].classList.toggle("recalled", isRecalled);
      if (isRecalled) spans[i].title = `recalled in ${number(recalls[i])} of ${number(pairs.length)}`;
      else spans[i].removeAttribute("title");
    }
  };

  const leastMarked = () => Math.max(1, data.markedShare * pairs.length);

  const markHeavy = () => {
    const least = leastMarked();
    for (let i = 0; i < nText; i++) {
      let n = 0;
      for (const pair of pairs) n += isHeavy(pair, i);
      spans[i].classList.toggle("heavy", n >= least);
    }
  };

  // -- one token ------------------------------------------------------------------------------------------

  const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  const nameOf = (i) => visible(texts[i]) || "(part of a character)";
  const number = (n) => n.toLocaleString("en");
  const element = (tag, text, title) => {
    const made = document.createElement(tag);
    made.textContent = text;
    if (title) made.title = title;
    return made;
  };

  const kindsOf = (i) => {
    const kinds = [];
    if (i < data.nSink) kinds.push("sink");
    if (data.pins.some(([start, end]) => start <= i && i < end)) kinds.push("pinned");
    if (i >= nPast - data.nRecent && i < nPast) kinds.push("recent at the end");
    if (i >= nPrompt) kinds.push("answer");
    return kinds;
  };

  const whenLeft = (row, head, i) => {
    const event = left[(row * nHead + head) * nPast + i];
    return event < events.length ? events[event] : null;
  };

  let shown = null, isKept = false;
  const showToken = (i) => {
    shown = i;
    const facts = [`position ${number(i)}`];
    if (i >= nRead) facts.push("not read yet");
    else facts.push(`held in ${number(counts[i])} of ${number(pairs.length)}`);
    if (i < nRead && recalls[i]) facts.push(`recalled in ${number(recalls[i])}`);
    const nHeavy = pairs.reduce((n, pair) => n + isHeavy(pair, i), 0);
    if (nHeavy) facts.push(`heavy hitter in ${number(nHeavy)}`);
    $("token").replaceChildren(element("bdi", nameOf(i)), ` ${[...facts, ...kindsOf(i)].join(", ")}`);
    const rows = document.createDocumentFragment();
    for (let row = 0; row < nLayer && i < nPast; row++) {
      const line = document.createElement("tr");
      line.append(element("th", data.layers[row]));
      for (let head = 0; head < nHead; head++) {
        const when = whenLeft(row, head, i);
        const away = gaps.get((row * nHead + head) * nPast + i) ?? [];
        const cell = element("td", "", `layer ${data.layers[row]}, KV head ${head}: ` +
          away.map(([gone, back]) => `left after ${number(gone)} and came back after ${number(back)} tokens, `).join("") +
          (when === null ? "held to the end" : `left after ${number(when)} tokens`));
        const isAway = away.some(([gone, back]) => gone <= nRead && nRead < back);
        if (i < nRead && (when === null || when > nRead) && !isAway) cell.className = "held";
        line.append(cell);
      }
      rows.append(line);
    }
    $("grid").replaceChildren(rows);
  };

  const choose = (i) => {
    document.querySelector("#text .chosen")?.classList.remove("chosen");
    isKept = true;
    spans[i].classList.add("chosen");
    showToken(i);
    if (i >= nPrompt) {
      $("answer").value = String(i - nPrompt + 1);
      showAnswer();
    }
  };

  // -- the answer -----------------------------------------------------------------------------------------

  const list = (id, entries, mark) => {
    for (const span of document.querySelectorAll(`#text .${mark}`)) span.classList.remove(mark);
    $(id).replaceChildren(...entries.map(([i, share]) => {
      spans[i].classList.add(mark);
      const line = document.createElement("li");
      const words = document.createElement("bdi");
      const around = (from, to) => visible(texts.slice(Math.max(0, from), to).join(""));
      words.append(around(i - 3, i), element("b", nameOf(i)), around(i + 1, i + 4));
      line.append(element("span", `${(100 * share).toFixed(2)} %`), words, element("small", number(i)));
      line.index = i;
      return line;
    }));
  };

  const showAnswer = () => {
    const which = Number($("answer").value);
    const at = (id) => ($(id).value === "all" ? 0 : Number($(id).value) + 1);
    const of = (lists) => (which === 0 ? lists.byHead[at("layer")][at("head")] : lists.byToken[which - 1]);
    $("scope").textContent = which === 0
      ? "In the layers and KV heads chosen above." : "Over all layers and KV heads.";
    list("kept", of(data.kept).entries, "kept");
    list("missed", data.missed === null ? [] : of(data.missed).entries, "missed");
    $("total").textContent = data.missed === null
      ? `Not known: ${data.whyNotMissed}.`
      : `${(100 * of(data.missed).sum).toFixed(1)} % of a full cache's attention went to entries that ` +
        "were gone from their layer and head by then.";
  };

  // -- the page -------------------------------------------------------------------------------------------

  const refresh = () => {
    shade();
    if (shown !== null) showToken(shown);
  };
  const rechoose = () => {
    pairs = chosenPairs();
    markHeavy();
    refresh();
    showAnswer();
  };
  const moveTo = (n) => {
    $("time").value = n;
    refresh();
  };

  const options = (id, all, names) => {
    $(id).append(new Option(all, "all"), ...names.map((name, i) => new Option(name, i)));
  };
  options("layer", "all", data.layers);
  options("head", "all", Array.from({ length: nHead }, (_, i) => i));
  $("answer").append(new Option("the whole answer", "0"));
  for (let i = nPrompt; i < nText; i++) $("answer").append(new Option(nameOf(i), i - nPrompt + 1));
  $("time").max = nPast;
  $("time").value = nPast;
  $("facts").textContent =
    `${data.policy}, budget ${number(data.budget)} entries per KV head, ${number(nPast)} tokens read, ` +
    `${number(nLayer)} layers of ${number(nHead)} KV heads, ${number(data.nEvictions)} evictions` +
    `${data.nRecalls ? `, ${number(data.nRecalls)} recalls` : ""}. ` +
    "Layers with a sliding window of their own are not shown.";
  for (const rule of [
    "The darker a token, the more of the chosen layers and KV heads held its entry after that many tokens.",
    data.heavy === null
      ? "There are no heavy hitters: this policy asks for no scores."
      : "Underlined: heavy hitters. In each layer and KV head these are, of the entries held at the end that are " +
        `no sinks, not pinned and not recent, the ${100 * data.heavyShare} % with the highest scores (attention ` +
        `received); a token is underlined if it is one in ${100 * data.markedShare} % of those chosen or more.`,
    ...(data.nRecalls === 0 ? [] : [
      "Underlined with a wave: recalled. An entry that had been evicted was fetched back from the attic, since the tokens " +
        `read then attended to it; a token is marked if that is so in ${100 * data.markedShare} % of those chosen or more.`,
    ]),
    "What a token of the answer looked at is the attention of the query that chose it, as the mean of the " +
      "shares in each layer and head. Both lists come from reading the same tokens again, once with the same evictions and " +
      "once with a full cache.",
  ]) $("rules").append(element("p", rule));

  build();
  rechoose();

  let isDue = false;
  $("time").addEventListener("input", () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      refresh();
    });
  });
  $("earlier").addEventListener("click", () => {
    const k = eventsBy(nRead - 1);
    moveTo(k > 0 ? events[k - 1] : 0);
  });
  $("later").addEventListener("click", () => moveTo(events[eventsBy(nRead)] ?? nPast));
  $("layer").addEventListener("change", rechoose);
  $("head").addEventListener("change", rechoose);
  $("answer").addEventListener("change", showAnswer);
  $("text").addEventListener("pointerover", (event) => {
    if (!isKept && event.target.index !== undefined) showToken(event.target.index);
  });
  $("text").addEventListener("click", (event) => {
    if (event.target.index !== undefined) choose(event.target.index);
  });
  for (const id of ["kept", "missed"])
    $(id).addEventListener("click", (event) => {
      const line = event.target.closest("li");
      if (line === null) return;
      spans[line.index].scrollIntoView({ block: "center" });
      document.querySelector("#text .chosen")?.classList.remove("chosen");
      spans[line.index].classList.add("chosen");
      showToken(line.index);
      isKept = true;
    });
  document.documentElement.dataset.ready = "";
})();
