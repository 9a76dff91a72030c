// Predicted speed, what can load the shards, the next best plans, what would fit, why others were rejected, and what is assumed.
{
  const ours = report.prediction;
  const figure = (name, value) => make("div", {}, make("dt", {}, name), make("dd", {}, value));
  if (ours) {
    put("speed",
      figure("decode step", seconds(ours.decode_step)), figure("decode", `${number(ours.decode_tokens)} tokens/s`),
      figure("prefill", `${number(ours.prefill_tokens)} tokens/s`), figure("first token of a whole context", seconds(ours.first_token)),
      figure("communication in a step", percent(ours.decode_links)), figure("pipeline bubble", percent(ours.bubble)));
  } else put("speed", figure("prediction", "none: the plan doesn't fit"));

  put("loaders", table([["loader"], ["layout"], ["can it"]],
    report.loaders.map((way) => [way.loader, way.layout, way.reason === null ? "yes" : `no: ${way.reason}`])));

  if (report.alternatives.length) {
    put("alternatives", table(
      [["tp", true], ["pp", true], ["dp", true], ["ep", true], ["etp", true], ["room", true], ["decode tokens/s", true], ["prefill tokens/s", true], ["first token", true], ["communication", true]],
      report.alternatives.map((other) => [
        ...["tp", "pp", "dp", "ep", "etp"].map((axis) => other.parallel[axis]), bytes(other.room),
        change(other.prediction.decode_tokens, ours.decode_tokens), change(other.prediction.prefill_tokens, ours.prefill_tokens),
        change(other.prediction.first_token, ours.first_token), percent(other.prediction.decode_links)])));
  } else put("alternatives", make("p", { class: "note" }, "No other plan was found that fits, or none was searched for."));

  if (report.remedies.length) {
    put("remedies", make("h3", {}, "What would fit, or not"),
      make("ul", {}, ...report.remedies.map((remedy) => make("li", {}, `${remedy.kind}: ${remedy.text}`))));
  }
  put("rejected", table([["tp", true], ["pp", true], ["plans", true], ["reason"]],
    report.rejected.map((group) => [group.tp, group.pp || "any", group.grids, group.detail])));
  put("assumptions", ...report.assumptions.map((line) => make("li", {}, line)));
}
