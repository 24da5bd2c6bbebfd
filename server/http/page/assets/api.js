// Requests to this service. Paths are relative, so that the page also works behind a prefix of a proxy.

const KEY = "tessera.api-key";

/** An error as the user reads it: the server's own message where there is one. */
export class ApiError extends Error {
  constructor(message, status = 0, requestId = null) {
    super(message);
    this.status = status;
    this.requestId = requestId;
  }
}

/** The API key of this tab, or "". */
export function apiKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return memory;
  }
}

let memory = "";

/** Keep the API key until this tab is closed. */
export function setApiKey(key) {
  memory = key;
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // Storage is blocked: the variable keeps it until the page is left.
  }
}

/** GET a path and return the response, whatever its status. */
export function get(path, options = {}) {
  return send(path, options);
}

/** GET a JSON document; throws an ApiError unless the status is 200. */
export async function getJson(path) {
  const response = await get(path);
  if (!response.ok) throw await errorOf(response);
  return response.json();
}

/** POST an encoded JSON body and return the response; throws an ApiError unless the status is 200. */
export async function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  const response = await send(path, { method: "POST", body, headers, signal });
  if (!response.ok) throw await errorOf(response);
  return response;
}

/** The message of an error body of any of the service's APIs; null if it is none. */
export function messageOf(body) {
  const error = body?.error;
  if (typeof error === "string") return error;
  if (typeof error?.message === "string") return error.message;
  return typeof body?.detail === "string" ? body.detail : null;
}

/** The warnings that a response's header lists. */
export function warningsOf(response) {
  const header = response.headers.get("x-tessera-warnings");
  if (header === null) return [];
  try {
    return [JSON.parse(header)].flat().map(String);
  } catch {
    return [header];
  }
}

async function send(path, { headers = {}, ...options }) {
  const key = apiKey();
  // Header values are bytes; `fetch` would reject other characters with a message that does not name the key.
  if (/[^\x21-\x7e]/.test(key)) throw new ApiError("The API key has characters that no key may have.", 401);
  if (key) headers = { ...headers, Authorization: `Bearer ${key}` };
  try {
    return await fetch(path, { ...options, headers, cache: "no-store", credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
}

async function errorOf(response) {
  const text = await response.text();
  let message = null;
  try {
    message = messageOf(JSON.parse(text));
  } catch {
    // Not JSON: a proxy's page, for example.
  }
  message ??= text.trim().slice(0, 500) || response.statusText || "The server sent no message.";
  return new ApiError(message, response.status, response.headers.get("x-request-id"));
}
