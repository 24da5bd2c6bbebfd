// The TypeScript SDK of Anthropic: messages, streams, tools and their results, counting tokens, errors.
import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "How warm is Rome?" }];
const common = { model: "bundled", max_tokens: 60, messages };
const tools = [{
  name: "weather",
  description: "Return the weather.",
  input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
}];
const check = (condition, what) => { if (!condition) throw new Error(what); };
const steps = {
  async create() {
    const reply = await client.messages.create({ ...common, system: "Answer." });
    check(reply.usage.output_tokens > 0, "no usage");
  },
  async stream() {
    const stream = client.messages.stream(common);
    let text = "";
    stream.on("text", (piece) => { text += piece; });
    const final = await stream.finalMessage();
    check(text === final.content.map((block) => block.text).join(""), "other text");
  },
  async tools() {
    const reply = await client.messages.create({ ...common, tools, tool_choice: { type: "any" } });
    const calls = reply.content.filter((block) => block.type === "tool_use");
    check(calls.length || reply.stop_reason === "max_tokens", "no call");
    const results = calls.map((call) => ({ type: "tool_result", tool_use_id: call.id, content: "20" }));
    if (results.length) {
      const after = [...messages, { role: "assistant", content: reply.content }, { role: "user", content: results }];
      await client.messages.create({ ...common, messages: after, tools });
    }
  },
  async toolsStreamed() {
    const final = await client.messages.stream({ ...common, tools, tool_choice: { type: "any" } }).finalMessage();
    check(["tool_use", "max_tokens"].includes(final.stop_reason), final.stop_reason);
  },
  async runner() {
    // The SDK runs the tool over several turns, in a thread of messages.
    const forecast = betaTool({
      name: "forecast", description: "Return the forecast.", inputSchema: tools[0].input_schema, run: () => "20 degrees",
    });
    const options = { tools: [forecast], tool_choice: { type: "any", disable_parallel_tool_use: true } };
    const reasons = [];
    const runner = client.beta.messages.toolRunner({ ...common, max_tokens: 300, ...options, max_iterations: 3 });
    for await (const message of runner) reasons.push(message.stop_reason);
    check(reasons.length === 3 || reasons.at(-1) === "max_tokens", reasons.join());
  },
  async count() {
    const { input_tokens: counted } = await client.messages.countTokens({ model: "bundled", messages, tools });
    const { usage } = await client.messages.create({ ...common, tools });
    const cached = (usage.cache_read_input_tokens ?? 0) + (usage.cache_creation_input_tokens ?? 0);
    check(counted === usage.input_tokens + cached, `${counted} of ${usage.input_tokens}`);
  },
  async error() {
    const refused = await client.messages.create({ ...common, messages: [] }).catch((error) => error);
    check(refused instanceof Anthropic.BadRequestError, `${refused}`);
  },
};

let failed = 0;
for (const [name, step] of Object.entries(steps)) {
  try {
    await step();
    console.log(`ok ${name}`);
  } catch (error) {
    failed += 1;
    console.log(`FAILED ${name}\n    ${error}`);
  }
}
process.exit(failed > 0 ? 1 : 0);
