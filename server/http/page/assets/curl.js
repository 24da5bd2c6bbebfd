// Shows a request as a curl command.

import { apiKey } from "./api.js";
import { copyOnClick } from "./copy.js";

/**
 * Keep the command of a view's <details class="request"> up to date while it is open.
 * @param {HTMLDetailsElement} details
 * @param {function(): {path: string, body: ?string}} request  The request as it would be sent now; body null if invalid.
 * @returns {function()} To be called when the request changes.
 */
export function showCommand(details, request) {
  const code = details.querySelector("pre");
  const update = () => {
    if (!details.open) return;
    const { path, body } = request();
    code.textContent = body === null ? "A setting is not valid." : command(path, body);
  };
  copyOnClick(details.querySelector(".copy"), () => code.textContent);
  details.addEventListener("toggle", update);
  return update;
}

function command(path, body) {
  const quoted = body.replaceAll("'", String.raw`'\''`);
  const key = apiKey() ? ` \\\n  -H "Authorization: Bearer $API_KEY"` : "";
  return `curl -N ${new URL(path, document.baseURI)} -H 'Content-Type: application/json'${key} \\\n  -d '${quoted}'`;
}
