// Error of each layer, alone, step by step and end to end, on a logarithmic axis with the limits.
{
  const series = [["alone", "alone, on the reference's input", "--weights"], ["decode", "the same, step by step", "--kv_cache"],
    ["hidden", "end to end", "--activations"]];
  const layers = report.layers.filter((layer) => series.some(([key]) => layer[key] !== null) || Object.keys(layer.operators).length);
  if (!layers.length) document.getElementById("layers-section").hidden = true;
  else {
    const measure = (value) => (report.strict ? value : 1 - value); // of a cosine what is missing to 1
    put("layers-note", report.strict ? "Relative error; the worst token of the worst rank. Layers that aren't a number stand at the top."
      : "One minus the cosine, of the worst rank; smoke tests.");
    const limits = report.strict ? [[report.limits.limit, "limit"], [report.limits.aim, "aim"]] : [[1 - report.limits.cosine, "limit"]];
    put("layers-legend", ...series.map(([, name, colour]) => make("span", {}, make("span", { class: "swatch", style: `background: var(${colour})` }), name)));
    const values = layers.flatMap((layer) => series.map(([key]) => layer[key])).filter((value) => value !== null).map(measure).filter((value) => value > 0);
    const low = Math.floor(Math.log10(Math.min(1e-8, ...values))), high = Math.ceil(Math.log10(Math.max(...limits.map(([value]) => value * 10), ...values)));
    const height = 300, left = 58, top = 12, bottom = 30;
    const y = (value) => top + (height - top - bottom) * (1 - (Math.log10(Math.max(value, 10 ** low)) - low) / (high - low));

    function show() {
      const space = document.getElementById("layers").clientWidth || 900;
      const each = Math.max(9, Math.min(60, (space - left - 8) / layers.length));
      const wide = Math.ceil(left + each * layers.length + 8);
      const image = draw("svg", { width: wide, height, role: "img", "aria-label": `Error of ${layers.length} layers; the table below has the same figures` });
      for (let power = low; power <= high; power += Math.max(1, Math.ceil((high - low) / 8))) {
        image.append(draw("line", { class: "axis", x1: left, x2: wide, y1: y(10 ** power), y2: y(10 ** power) }));
        image.append(draw("text", { x: left - 6, y: y(10 ** power) + 4, "text-anchor": "end" }, `1e${power}`));
      }
      for (const [value, name] of limits) {
        image.append(draw("line", { class: "limit", x1: left, x2: wide, y1: y(value), y2: y(value) }));
        image.append(draw("text", { class: "limit-text", x: left + 4, y: y(value) - 5 }, name));
      }
      const thick = Math.max(2, each / 4 - 1);
      layers.forEach((layer, place) => series.forEach(([key, , colour], at) => {
        if (layer[key] === null && !(key === "alone" && report.first_wrong[report.layers.indexOf(layer)])) return;
        const value = layer[key] === null ? 10 ** high : measure(layer[key]);
        image.append(draw("rect", { x: left + place * each + at * (thick + 1), y: y(value), width: thick, height: Math.max(1, height - bottom - y(value)), style: `fill: var(${colour})` }));
      }));
      const every = Math.ceil(40 / each);
      layers.forEach((layer, place) => {
        if (place % every === 0) image.append(draw("text", { x: left + place * each, y: height - bottom + 18 }, layer.layer));
      });
      tips(image, (event) => {
        const layer = layers[Math.floor((event.clientX - image.getBoundingClientRect().left - left) / each)];
        return layer && [`layer ${layer.layer}, worst on rank ${layer.rank}`, ...series.map(([key, name]) => `${name}: ${precise(layer[key])}`),
          ...Object.entries(layer.operators).map(([name, value]) => `${name}: ${precise(value)}`)].join("\n");
      });
      put("layers", image);
    }
    drawn(show);

    const names = [...new Set(layers.flatMap((layer) => Object.keys(layer.operators)))];
    put("layers-table", table(
      [["layer", true], ["rank", true], ...series.map(([, name]) => [name, true]), ...names.map((name) => [name, true]), ["first wrong"]],
      layers.map((layer) => [layer.layer, layer.rank, ...series.map(([key]) => precise(layer[key])),
        ...names.map((name) => (name in layer.operators ? precise(layer.operators[name]) : "")), report.first_wrong[report.layers.indexOf(layer)] || ""])));
  }
}
