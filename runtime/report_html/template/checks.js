// The verdict, the checks, what wasn't checked, the figures, and the answers.
const precise = (value) => (value === null || value === undefined ? "not a number" : value === 0 ? "0" : Number(value.toPrecision(4)).toString());
const told = (value) => (value === null || value === undefined ? "" : precise(value));
{
  const verdict = document.getElementById("verdict");
  verdict.className = report.passed ? "yes" : "no";
  verdict.textContent = report.verdict;
  const sizes = Object.entries(report.parallel || {}).map(([axis, size]) => `${axis} ${size}`).join(", ");
  put("summary", report.tokens ? `${number(report.tokens)} tokens on ${report.device} in ${report.compute}${sizes ? `; ${sizes}` : ""}.` : "");

  const rows = report.checks.map((check) => [check.name,
    make("span", { class: check.passed ? "yes" : "no" }, check.passed ? "passed" : "FAILED"),
    precise(check.worst), `${check.bound === "most" ? "\u2264" : "\u2265"} ${check.limit}`, check.where, check.note]);
  put("checks", table([["check"], ["result"], ["worst", true], ["passes", true], ["where"], ["what is measured"]], rows));
  put("unchecked", ...report.not_checked.map((sentence) => make("li", {}, sentence)));

  const shown = [
    ["time to first token", report.first_token_seconds, seconds], ["time per token", report.token_seconds, seconds],
    ["tokens a second", report.tokens_per_second, (value) => value.toPrecision(3)],
    ["peak of memory", report.peak_memory, bytes], ["shards read", report.bytes_read, bytes],
    ["loading", report.seconds_loading, (value) => `${seconds(value)}, ${bytes(report.bytes_loaded / Math.max(value, 1e-9))}/s`],
    ["waited for weights", report.seconds_waited, seconds], ["a rank computed", report.seconds_computing, seconds],
    ["a rank compared", report.seconds_comparing, seconds], ["whole run", report.seconds, seconds],
  ].filter(([, value]) => value !== null && value !== undefined);
  put("figures", ...shown.map(([name, value, words]) => make("div", {}, make("dt", {}, name), make("dd", {}, words(value)))));

  const texts = report.texts || [];
  if (!texts.length) document.getElementById("texts-section").hidden = true;
  else put("texts", table([["text", true], ["tokens", true], ["log-likelihood a token", true], ["the reference's", true], ["divergence", true]],
    texts.map((text, at) => [at, text.tokens, told(text.log_likelihood), told(text.reference_log_likelihood), told(text.divergence)])));
  if (!report.sensitivity.length) document.getElementById("sensitivity-section").hidden = true;
  else put("sensitivity", table([["group"], ["format"], ["divergence", true], ["log-likelihood", true], ["cosine", true], ["routes alike", true]],
    report.sensitivity.map((cost) => [cost.group, cost.format, told(cost.divergence), told(cost.log_likelihood), told(cost.cosine), told(cost.routes_alike)])));

  const answers = report.answers.length ? report.answers : report.generated.length ? [report] : [];
  if (!answers.length) document.getElementById("answers-section").hidden = true;
  else put("answers", ...answers.map((answer) => make("li", {}, answer.text === null ? answer.generated.join(", ") : answer.text)));
}
