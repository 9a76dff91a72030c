// Summary, verdict, and one stacked column a rank with the line of what may be used.
{
  const ranks = report.ranks;
  const sizes = report.parallel;
  const load = report.workload;
  const cluster = report.cluster ? `${report.cluster.nodes} x ${report.cluster.cards} ${report.cluster.card}` : "no cluster";
  const formats = Object.entries(report.weights).map(([group, format]) => `${group} as ${format}`);
  put("summary", `${report.model.family}: ${number(report.model.tensors)} tensors, ${bytes(report.model.bytes)}, on ${cluster}. ` +
    `tp ${sizes.tp}, pp ${sizes.pp}, dp ${sizes.dp}, ep ${sizes.ep}, etp ${sizes.etp}. ` +
    `Context ${number(load.context)}, ${number(load.concurrency)} sequences, KV cache ${load.kv_dtype}, rules of ${load.engine}.` +
    (formats.length ? ` In another precision: ${formats.join(", ")}.` : ""));
  const worst = ranks.reduce((a, b) => (a.limit - a.total <= b.limit - b.total ? a : b));
  const left = worst.limit - worst.total;
  const verdict = document.getElementById("verdict");
  verdict.className = report.fits ? "yes" : "no";
  verdict.textContent = report.fits
    ? `Fits: the fullest rank (${worst.rank}) has ${bytes(left)} left, counted at the ${load.assume} end.`
    : `Does not fit: rank ${worst.rank} needs ${bytes(worst.total)} of ${bytes(worst.limit)}, ${bytes(-left)} too much, counted at the ${load.assume} end.`;

  put("legend",
    ...report.parts.map((part) => make("span", {}, make("span", { class: "swatch", style: `background: var(--${part.key})` }), part.name)),
    make("span", {}, make("span", { class: "swatch", style: "background: var(--limit); height: 3px; vertical-align: 0.25em" }),
      `may be used: ${bytes(worst.limit)} of ${bytes(worst.capacity)}`));

  const height = 260, left0 = 58, top0 = 8, bottom = 28;
  const largest = Math.max(...ranks.map((rank) => Math.max(rank.total, rank.capacity))) * 1.04;
  const y = (value) => top0 + (height - top0) * (1 - value / largest);

  function show() {
    const space = document.getElementById("bars").clientWidth;
    const each = Math.max(2.5, Math.min(40, (space - left0 - 4) / ranks.length));
    const wide = Math.max(Math.min(space, 1200), Math.ceil(left0 + each * ranks.length + 4));
    const image = draw("svg", { width: wide, height: height + bottom, role: "img",
      "aria-label": "Stacked memory of each rank, with the limit; the table below has the same figures" });
    for (const at of ticks(largest, 5)) {
      image.append(draw("line", { class: "axis", x1: left0, x2: wide, y1: y(at), y2: y(at) }));
      image.append(draw("text", { x: left0 - 6, y: y(at) + 4, "text-anchor": "end" }, at ? bytes(at) : "0"));
    }
    ranks.forEach((rank, place) => {
      let held = 0;
      for (const part of report.parts) {
        const top = y(held + rank[part.key]);
        image.append(draw("rect", { x: left0 + place * each, y: top, width: each - (each > 5 ? 1.5 : 0.5),
          height: Math.max(0, y(held) - top), style: `fill: var(--${part.key})` }));
        held += rank[part.key];
      }
    });
    image.append(draw("line", { class: "limit", x1: left0, x2: wide, y1: y(worst.limit), y2: y(worst.limit) }));
    const every = Math.ceil(44 / each);
    ranks.forEach((rank, place) => {
      if (place % every === 0 && left0 + place * each < wide - 12) image.append(draw("text", { x: left0 + (place + 0.5) * each, y: height + 16, "text-anchor": "middle" }, rank.rank));
    });
    image.append(draw("text", { x: left0 - 20, y: height + 16, "text-anchor": "end" }, "rank"));
    tips(image, (event) => {
      const rank = ranks[Math.floor((event.clientX - image.getBoundingClientRect().left - left0) / each)];
      return rank && [`rank ${rank.rank}, stage ${rank.stage}`, ...report.parts.map((part) => `${part.name} ${bytes(rank[part.key])}`),
        `total ${bytes(rank.total)} (${bytes(rank.low)} to ${bytes(rank.high)})`, `left ${bytes(rank.limit - rank.total)}`].join("\n");
    });
    put("bars", image);
  }
  drawn(show);

  const runs = [];
  for (const rank of ranks) {
    const key = JSON.stringify([rank.stage, ...report.parts.map((part) => rank[part.key])]);
    if (runs.length && runs[runs.length - 1].key === key) runs[runs.length - 1].last = rank.rank;
    else runs.push({ key, first: rank.rank, last: rank.rank, rank });
  }
  put("ranks", table(
    [["ranks"], ["stage", true], ["layers"], ...report.parts.map((part) => [part.name, true]), ["total", true], ["left", true]],
    runs.map(({ first, last, rank }) => {
      const [start, stop] = report.stages[rank.stage];
      return [first === last ? first : `${first}\u2013${last}`, rank.stage, stop - start > 1 ? `${start}\u2013${stop - 1}` : start,
        ...report.parts.map((part) => bytes(rank[part.key])), bytes(rank.total), bytes(rank.limit - rank.total)];
    })));
}
