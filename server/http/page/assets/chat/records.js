// Reads records of the store, which another version of the page, a crash or a person may have written.

const ROLES = ["user", "assistant", "system", "tool"];
const OPTIONAL = { reasoning: "string", reasoningSeconds: "number", model: "string", reason: "string", name: "string", toolCallId: "string", writing: "number" };

/** A conversation in which every field has its type. */
export function conversationOf(record) {
  const { id, title, created, updated, settings, head, from } = record;
  return {
    id, title: textOf(title), created: numberOf(created), updated: numberOf(updated), head: idOf(head), from: idOf(from),
    settings: settings !== null && typeof settings === "object" && !Array.isArray(settings) ? settings : {},
  };
}

/** A message in which every field has its type. */
export function messageOf(record) {
  const { id, conversation, parent, created, role, content, files, toolCalls, usage } = record;
  const message = {
    id, conversation, parent: idOf(parent), created: numberOf(created), role: ROLES.includes(role) ? role : "user",
    content: textOf(content),
  };
  for (const [name, type] of Object.entries(OPTIONAL)) if (typeof record[name] === type) message[name] = record[name];
  if (Array.isArray(files)) message.files = files.filter((file) => typeof file?.name === "string" && typeof file.text === "string");
  if (Array.isArray(toolCalls)) message.toolCalls = toolCalls.filter((call) => typeof call?.name === "string");
  if (typeof usage?.promptTokens === "number") message.usage = usage;
  return message;
}

function textOf(value) {
  if (typeof value === "string") return value;
  return value === undefined || value === null ? "" : JSON.stringify(value);
}

function numberOf(value) {
  return Number.isFinite(value) ? value : 0;
}

function idOf(value) {
  return typeof value === "string" ? value : null;
}
