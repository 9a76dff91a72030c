// When each rank waited for weights, computed and compared; and how many bytes of weights lay in memory.
{
  const spans = report.timeline;
  if (!spans.length) document.getElementById("timeline-section").hidden = true;
  else {
    const phases = [["waiting for weights", "--activations"], ["computing", "--weights"], ["comparing", "--runtime"]];
    put("timeline-legend", ...phases.map(([name, colour]) => make("span", {}, make("span", { class: "swatch", style: `background: var(${colour})` }), name)));
    const ranks = [...new Set(spans.map(([rank]) => rank))].sort((a, b) => a - b);
    const last = Math.max(1e-9, ...spans.map((span) => span[5]));
    const tall = Math.max(4, Math.min(22, Math.floor(520 / ranks.length))), left = 58, bottom = 24;

    function axis(image, wide, height, top) {
      for (const at of ticks(last, 8)) {
        const x = left + ((wide - left - 8) * at) / last;
        image.append(draw("line", { class: "axis", x1: x, x2: x, y1: top, y2: height - bottom }));
        image.append(draw("text", { x, y: height - 6, "text-anchor": "middle" }, at ? seconds(at) : "0"));
      }
    }

    function show() {
      const wide = Math.max(400, document.getElementById("timeline").clientWidth || 900), height = ranks.length * tall + bottom;
      const x = (time) => left + ((wide - left - 8) * time) / last;
      const image = draw("svg", { width: wide, height, role: "img", "aria-label": `Timeline of ${ranks.length} ranks over ${seconds(last)}` });
      axis(image, wide, height, 0);
      for (const [rank, section, ...times] of spans) {
        phases.forEach(([name, colour], phase) => {
          const [start, stop] = [times[phase], times[phase + 1]];
          if (stop <= start) return;
          const box = draw("rect", { x: x(start), y: ranks.indexOf(rank) * tall, width: Math.max(0.4, x(stop) - x(start)), height: tall - 1, style: `fill: var(${colour})` });
          tips(box, () => `rank ${rank}, ${report.sections[section]}\n${name} ${seconds(stop - start)}`);
          image.append(box);
        });
      }
      const every = Math.ceil(14 / tall);
      ranks.forEach((rank, row) => {
        if (row % every === 0) image.append(draw("text", { x: left - 8, y: (row + 0.5) * tall + 4, "text-anchor": "end" }, rank));
      });
      put("timeline", image);

      const held = [...spans].sort((a, b) => a[3] - b[3]);
      const most = Math.max(1, ...held.map((span) => span[6])), deep = 160, y = (size) => 8 + (deep - 8 - bottom) * (1 - size / (most * 1.05));
      const chart = draw("svg", { width: wide, height: deep, role: "img", "aria-label": `Weights in memory, at most ${bytes(most)}` });
      axis(chart, wide, deep, 8);
      for (const at of ticks(most, 3)) chart.append(draw("text", { x: left - 6, y: y(at) + 4, "text-anchor": "end" }, at ? bytes(at) : "0"));
      chart.append(draw("polyline", { class: "typical", points: held.map((span) => `${x(span[3]).toFixed(1)},${y(span[6]).toFixed(1)}`).join(" ") }));
      put("memory", chart);
    }
    drawn(show);
  }
}
