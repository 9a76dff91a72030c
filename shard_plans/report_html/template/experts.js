// Which rank holds which expert: a cell each, experts across, ranks downwards; copies in another colour.
{
  const experts = report.experts_by_slot;
  if (!experts) document.getElementById("experts-section").hidden = true;
  else {
    const { tp, dp, ep, etp } = report.parallel;
    const across = tp * dp;
    const ids = (text) => text.split(",").flatMap((word) => {
      const [first, last = first] = word.split("-").map(Number);
      return Array.from({ length: last - first + 1 }, (_, at) => first + at);
    });
    const picker = document.getElementById("layer");
    for (const [layer] of experts.layers) picker.append(make("option", { value: layer }, layer));
    const canvas = make("canvas", { role: "img" });
    const layout = { rows: [], cell: 1, tall: 1 };

    function show() {
      const [layer, placement] = experts.layers.find(([each]) => String(each) === picker.value);
      const stage = report.stages.findIndex(([start, stop]) => start <= layer && layer < stop);
      const slots = experts.placements[placement].map(ids);
      const held = Array.from({ length: across }, (_, rank) => {
        const slot = Math.floor(rank / (ep * etp)) * ep + Math.floor((rank % (ep * etp)) / etp);
        return slots[slots.length === ep ? slot % ep : slot];
      });
      const copies = new Map();
      for (const slot of slots) for (const id of slot) copies.set(id, (copies.get(id) || 0) + 1);
      const replicas = slots.length / ep;
      const cell = Math.max(1, Math.min(14, Math.floor(1160 / experts.count)));
      const tall = Math.max(2, Math.min(18, Math.floor(480 / across)));
      canvas.width = experts.count * cell;
      canvas.height = across * tall;
      const style = getComputedStyle(document.documentElement);
      const pen = canvas.getContext("2d");
      pen.fillStyle = style.getPropertyValue("--raised");
      pen.fillRect(0, 0, canvas.width, canvas.height);
      held.forEach((list, rank) => {
        for (const id of list) {
          pen.fillStyle = style.getPropertyValue(copies.get(id) > replicas ? "--copy" : "--held");
          pen.fillRect(id * cell, rank * tall, cell - (cell > 3 ? 1 : 0), tall - (tall > 3 ? 1 : 0));
        }
      });
      Object.assign(layout, { rows: held, cell, tall, first: stage * across, copies });
      const most = Math.max(...held.map((list) => list.length));
      const doubled = [...copies.values()].filter((count) => count > replicas).length;
      const told = `layer ${layer} lies on stage ${stage}, ranks ${stage * across} to ${(stage + 1) * across - 1}: ${experts.count} experts, ` +
        `experts from left to right, ranks from top to bottom, at most ${most} on a rank${etp > 1 ? `, each cut over ${etp} ranks` : ""}${doubled ? `; ${doubled} have redundant copies (orange)` : ""}`;
      document.getElementById("experts-told").textContent = told;
      canvas.setAttribute("aria-label", told);
    }

    tips(canvas, (event) => {
      const box = canvas.getBoundingClientRect();
      const rank = Math.floor((event.clientY - box.top - 1) / layout.tall);
      const id = Math.floor((event.clientX - box.left - 1) / layout.cell);
      const list = layout.rows[rank];
      return list && id >= 0 && id < experts.count && `expert ${id}, rank ${layout.first + rank}: ${list.includes(id) ? "held" : "not held"}\n${list.length} experts on this rank`;
    });
    picker.addEventListener("change", show);
    put("experts", canvas);
    drawn(show);
  }
}
