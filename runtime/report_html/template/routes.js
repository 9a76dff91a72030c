// Where tokens went: a cell for each layer and expert, the load of one layer, and the routers' margins.
{
  const layers = report.layers.filter((layer) => layer.load);
  if (!layers.length) document.getElementById("routes-section").hidden = true;
  else {
    const count = Math.max(...layers.map((layer) => layer.load.length));
    const canvas = make("canvas", { role: "img" });
    const cell = Math.max(2, Math.min(18, Math.floor(1160 / count))), tall = Math.max(3, Math.min(18, Math.floor(640 / layers.length)));
    canvas.width = count * cell;
    canvas.height = layers.length * tall;
    const unused = layers.reduce((sum, layer) => sum + layer.load.filter((chosen) => !chosen).length, 0);
    canvas.setAttribute("aria-label", `${layers.length} layers of ${count} experts; ${unused} of them were never chosen`);
    function paint() {
      const style = getComputedStyle(document.documentElement), pen = canvas.getContext("2d");
      pen.fillStyle = style.getPropertyValue("--raised");
      pen.fillRect(0, 0, canvas.width, canvas.height);
      pen.fillStyle = style.getPropertyValue("--held");
      layers.forEach((layer, row) => {
        const most = Math.max(1, ...layer.load);
        layer.load.forEach((chosen, expert) => {
          if (!chosen) return;
          pen.globalAlpha = 0.15 + (0.85 * chosen) / most;
          pen.fillRect(expert * cell, row * tall, cell - (cell > 3 ? 1 : 0), tall - (tall > 3 ? 1 : 0));
        });
      });
      pen.globalAlpha = 1;
    }
    tips(canvas, (event) => {
      const box = canvas.getBoundingClientRect();
      const layer = layers[Math.floor((event.clientY - box.top) / tall)], expert = Math.floor((event.clientX - box.left) / cell);
      return layer && layer.load[expert] !== undefined && `layer ${layer.layer}, expert ${expert}: chosen ${layer.load[expert]} times`;
    });
    put("heat", canvas);
    drawn(paint);

    const picker = document.getElementById("layer");
    for (const layer of layers) picker.append(make("option", { value: layer.layer }, layer.layer));
    function show() {
      const layer = layers.find((each) => String(each.layer) === picker.value) || layers[0];
      const all = layer.load.reduce((sum, chosen) => sum + chosen, 0), most = Math.max(...layer.load), mean = all / layer.load.length;
      put("load-told", `${number(all)} choices; the busiest expert (${layer.load.indexOf(most)}) got ${most}, ${(most / mean).toFixed(1)} times the mean; ` +
        `${layer.load.filter((chosen) => !chosen).length} of ${layer.load.length} got none`);
      const each = Math.max(2, Math.min(24, 1100 / layer.load.length)), height = 140;
      const image = draw("svg", { width: Math.ceil(each * layer.load.length) + 4, height, role: "img", "aria-label": `Load of the experts of layer ${layer.layer}` });
      layer.load.forEach((chosen, expert) => {
        const size = ((height - 4) * chosen) / Math.max(1, most);
        image.append(draw("rect", { x: expert * each, y: height - size, width: each > 3 ? each - 1 : each, height: size, style: "fill: var(--held)" }));
      });
      tips(image, (event) => {
        const expert = Math.floor((event.clientX - image.getBoundingClientRect().left) / each);
        return layer.load[expert] !== undefined && `expert ${expert}: ${layer.load[expert]} of ${all} choices`;
      });
      put("load", image);
    }
    picker.addEventListener("change", show);
    drawn(show);

    const list = (tokens) => (tokens.length ? tokens.join(", ") : "none");
    put("margins", table([["layer", true], ["smallest margin", true], ["tokens routed wrongly"], ["near-ties turned, alone"], ["near-ties turned, end to end"]],
      layers.map((layer) => [layer.layer, precise(layer.margin), list(layer.wrong), list(layer.ties), list(layer.replayed)])));
  }
}
