// Conversations as files: JSON with all branches, which can be imported again, and Markdown of the branch shown.

import { withFiles } from "./attachments.js";
import { newId, now, titleOf, Tree } from "./tree.js";

const FORMAT = "tessera.conversations";
const ROLES = ["user", "assistant", "system", "tool"];
const HEADINGS = { user: "You", assistant: "Model", system: "System", tool: "Tool" };
// Fields that are kept of an imported message, with the type of their values.
const FIELDS = { reasoning: "string", model: "string", reason: "string", name: "string", toolCallId: "string" };

/** The text of a JSON file of conversations, each with its messages. */
export function toJson(bundles) {
  const conversations = bundles.map(({ conversation, messages }) => ({
    ...conversation,
    // By age, so that a message follows its parent.
    messages: messages.toSorted((a, b) => a.created - b.created).map(({ conversation: _, ...message }) => message),
  }));
  return JSON.stringify({ format: FORMAT, version: 1, exported: new Date().toISOString(), conversations }, null, 2);
}

/** Conversations as Markdown: of each the branch that is shown. */
export function toMarkdown(bundles) {
  return bundles.map(document_).join("\n---\n\n");
}

function document_({ conversation, messages }) {
  const system = conversation.settings["chat-system"]?.trim();
  const parts = [`# ${conversation.title || "Conversation"}`];
  if (system) parts.push(`## ${HEADINGS.system}`, system);
  for (const message of new Tree(messages).path(conversation.head)) {
    const calls = (message.toolCalls ?? []).map((call) => `\`${call.name}(${call.arguments})\``);
    parts.push(`## ${HEADINGS[message.role]}`, ...[withFiles(message), ...calls].filter(Boolean));
  }
  return `${parts.join("\n\n")}\n`;
}

/**
 * Read a file of `toJson`, or `{"messages": [...]}` in OpenAI's form, as new conversations.
 * @returns {{conversation: object, messages: object[]}[]}
 * @throws {Error} Names the place in the file.
 */
export function fromJson(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch (error) {
    throw new Error(`The file is not JSON: ${error.message}`);
  }
  if (file?.format === FORMAT) {
    expect(file.version === 1, "`version`", "1", file.version);
    expect(Array.isArray(file.conversations), "`conversations`", "a list", file.conversations);
    return file.conversations.map((one, i) => bundle(one, `conversations[${i}]`));
  }
  if (Array.isArray(file?.messages)) return [bundle({ messages: file.messages.map(fromOpenAI) }, "")];
  throw new Error(`The file has neither \`format\` "${FORMAT}" nor a list \`messages\`.`);
}

// A message of a request of OpenAI's API, as one of a file.
function fromOpenAI(message, i) {
  const at = `messages[${i}]`;
  expect(message !== null && typeof message === "object", at, "an object", message);
  const { role, content, reasoning_content: reasoning, tool_calls: calls, tool_call_id: toolCallId } = message;
  expect(!calls || Array.isArray(calls), `${at}.tool_calls`, "a list", calls);
  const toolCalls = calls?.map((call) => ({
    id: call?.id, name: call?.function?.name, arguments: call?.function?.arguments,
  }));
  const text = (part, j) => {
    expect(part?.type === "text", `${at}.content[${j}].type`, "text", part?.type);
    return part.text;
  };
  return {
    reasoning, ...message, role: role === "developer" ? "system" : role, toolCalls, toolCallId,
    content: Array.isArray(content) ? content.map(text).join("\n") : content,
    id: String(i), parent: i ? String(i - 1) : null,
  };
}

function bundle(one, place) {
  expect(one !== null && typeof one === "object", place, "an object", one);
  expect(Array.isArray(one.messages), `${place}.messages`, "a list", one.messages);
  const ids = new Map();
  const time = now();
  const id = newId();
  const messages = one.messages.map((message, i) => {
    const at = `${place && `${place}.`}messages[${i}]`;
    expect(message !== null && typeof message === "object", at, "an object", message);
    expect(typeof message.id === "string" && !ids.has(message.id), `${at}.id`, "a text of its own", message.id);
    // A parent stands before its children, so that there is no circle.
    const parent = message.parent ?? null;
    expect(parent === null || ids.has(parent), `${at}.parent`, "null or the id of a message before", parent);
    expect(ROLES.includes(message.role), `${at}.role`, ROLES.join(", "), message.role);
    const content = message.content ?? "";
    expect(typeof content === "string", `${at}.content`, "a text", content);
    ids.set(message.id, newId());
    return {
      id: ids.get(message.id), conversation: id, parent: parent === null ? null : ids.get(parent),
      created: Number(message.created) || time + i, role: message.role, content,
      ...kept(message, at),
    };
  });
  const title = typeof one.title === "string" ? one.title : titleOf(messages[0]?.content ?? "");
  const settings = Object.entries(one.settings ?? {}).filter(([, value]) => ["string", "boolean"].includes(typeof value));
  const conversation = {
    id, title, created: Number(one.created) || time, updated: time, settings: Object.fromEntries(settings),
    head: ids.get(one.head) ?? null, from: ids.get(one.from) ?? null,
  };
  return { conversation, messages };
}

function kept(message, place) {
  const found = {};
  for (const [name, type] of Object.entries(FIELDS)) {
    const value = message[name] ?? undefined;
    if (value !== undefined) expect(typeof value === type, `${place}.${name}`, `a ${type}`, value);
    if (value !== undefined) found[name] = value;
  }
  const texts = (list, names, at) => {
    expect(Array.isArray(list), at, "a list", list);
    return list.map((item, i) => {
      for (const name of names) expect(typeof item?.[name] === "string", `${at}[${i}].${name}`, "a text", item?.[name]);
      return Object.fromEntries(names.map((name) => [name, item[name]]));
    });
  };
  if (message.files) {
    found.files = texts(message.files, ["name", "text"], `${place}.files`).map((file) => ({
      ...file, size: new TextEncoder().encode(file.text).length,
    }));
  }
  if (message.toolCalls) found.toolCalls = texts(message.toolCalls, ["id", "name", "arguments"], `${place}.toolCalls`);
  return found;
}

function expect(holds, place, wanted, given) {
  if (holds) return;
  const text = JSON.stringify(given) ?? "nothing";
  throw new Error(`${place} must be ${wanted}. Given: ${text.length > 80 ? `${text.slice(0, 80)}…` : text}`);
}

/** Let the browser save a text as a file. */
export function download(name, text) {
  const type = name.endsWith(".json") ? "application/json" : "text/markdown";
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** The name of a file for conversations with this title. */
export function fileName(title, suffix) {
  const words = title.normalize("NFKD").replaceAll(/[^\p{L}\p{N}]+/gu, "-").slice(0, 50).replaceAll(/^-+|-+$/g, "");
  return `${words || "conversation"}.${suffix}`;
}
