// Memory of the fullest rank against context and concurrency, on a logarithmic axis, with the limit.
{
  const limit = Math.min(...report.ranks.map((rank) => rank.limit));
  const words = { context: ["context", "tokens"], concurrency: ["concurrency", "sequences"] };
  const short = (value) => (value >= 1 << 20 && value % (1 << 20) === 0 ? `${value >> 20}M` : value >= 1024 && value % 1024 === 0 ? `${value >> 10}K` : number(value));

  function chart(curve) {
    const [name, unit] = words[curve.name];
    const space = document.getElementById("curves").clientWidth;
    const wide = space >= 784 ? (space - 16) / 2 : space, height = 300, left = 58, right = 14, top = 12, bottom = 34;
    const points = curve.points;
    const first = Math.log2(points[0].value), last = Math.log2(points[points.length - 1].value) || 1;
    const largest = Math.max(limit * 1.1, ...points.map((point) => point.high)) * 1.03;
    const x = (value) => left + ((wide - left - right) * (Math.log2(value) - first)) / Math.max(1e-9, last - first);
    const y = (value) => top + (height - top - bottom) * (1 - value / largest);
    const edge = curve.edge ? `${number(curve.edge)} ${unit} fit${curve.edge === curve.limit ? (curve.name === "context" ? " (the longest that the model allows)" : " (no more were tried)") : ""}` : "nothing fits";
    const image = draw("svg", { width: wide, height, role: "img", "aria-label": `Memory against ${name}: ${edge}` });
    for (const at of ticks(largest, 5)) {
      image.append(draw("line", { class: "axis", x1: left, x2: wide - right, y1: y(at), y2: y(at) }));
      image.append(draw("text", { x: left - 6, y: y(at) + 4, "text-anchor": "end" }, at ? bytes(at) : "0"));
    }
    const powers = [];
    for (let power = Math.ceil(first); power <= Math.floor(last); power++) powers.push(power);
    const every = Math.ceil(powers.length / Math.max(2, Math.floor(wide / 60)));
    powers.forEach((power, place) => {
      if (place % every === 0) image.append(draw("text", { x: x(2 ** power), y: height - bottom + 18, "text-anchor": "middle" }, short(2 ** power)));
    });
    const path = (list, end) => list.map((point) => `${x(point.value).toFixed(1)},${y(point[end]).toFixed(1)}`).join(" ");
    image.append(draw("polygon", { points: `${path(points, "high")} ${path([...points].reverse(), "low")}`, style: "fill: var(--band)" }));
    image.append(draw("polyline", { class: "typical", points: path(points, "typical") }));
    image.append(draw("line", { class: "limit", x1: left, x2: wide - right, y1: y(limit), y2: y(limit) }));
    image.append(draw("text", { class: "limit-text", x: left + 6, y: y(limit) - 6 }, `limit ${bytes(limit)}`));
    image.append(draw("line", { class: "now", x1: x(curve.now), x2: x(curve.now), y1: top, y2: height - bottom }));
    tips(image, (event) => {
      const at = event.clientX - image.getBoundingClientRect().left;
      const point = points.reduce((a, b) => (Math.abs(x(a.value) - at) <= Math.abs(x(b.value) - at) ? a : b));
      return `${number(point.value)} ${unit}\ntypical ${bytes(point.typical)}\n${bytes(point.low)} to ${bytes(point.high)}\n${point[report.workload.assume] <= limit ? "fits" : "too much"}`;
    });
    return make("figure", {}, make("figcaption", {}, `${name}: planned for ${number(curve.now)} ${unit} (dotted); ${edge}`), image);
  }

  drawn(() => put("curves", ...report.curves.map(chart)));
}
