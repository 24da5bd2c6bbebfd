// Writes the JSON schemas of Zod's and TypeBox's types as JSON lines:
//   npm install zod @sinclair/typebox && node zod.mjs > zod.jsonl
import { createRequire } from "node:module";
import fs from "node:fs";
import path from "node:path";
import { z } from "zod";
import { Type } from "@sinclair/typebox";

const require = createRequire(import.meta.url);
function version(name) {
  let folder = path.dirname(require.resolve(name));
  while (!fs.existsSync(path.join(folder, "package.json")) ||
         !JSON.parse(fs.readFileSync(path.join(folder, "package.json"))).version) folder = path.dirname(folder);
  return JSON.parse(fs.readFileSync(path.join(folder, "package.json"))).version;
}
const Category = z.object({ name: z.string(), get children() { return z.array(Category); } });
const zods = {
  string: z.string(), min: z.string().min(2), max: z.string().max(5), length: z.string().length(3),
  regex: z.string().regex(/^[A-Z]{2}-\d+$/), startsWith: z.string().startsWith("a."), endsWith: z.string().endsWith("b"),
  includes: z.string().includes("x/y"), lowercase: z.string().lowercase(), uppercase: z.string().uppercase(),
  trim: z.string().trim(), toLowerCase: z.string().toLowerCase(), email: z.email(), uuid: z.uuid(), uuidv4: z.uuidv4(),
  uuidv7: z.uuidv7(), guid: z.guid(), url: z.url(), httpUrl: z.httpUrl(), emoji: z.emoji(), nanoid: z.nanoid(),
  cuid: z.cuid(), cuid2: z.cuid2(), ulid: z.ulid(), xid: z.xid(), ksuid: z.ksuid(), ipv4: z.ipv4(), ipv6: z.ipv6(),
  cidrv4: z.cidrv4(), cidrv6: z.cidrv6(), mac: z.mac?.(), base64: z.base64(), base64url: z.base64url(), hex: z.hex?.(),
  hostname: z.hostname(), e164: z.e164(), jwt: z.jwt(), isoDate: z.iso.date(), isoTime: z.iso.time(),
  isoDatetime: z.iso.datetime(), isoDatetimeOffset: z.iso.datetime({ offset: true, local: true }),
  isoDuration: z.iso.duration(), hash: z.hash?.("sha256"), templateLiteral: z.templateLiteral(["v", z.number(), "-", z.enum(["a", "b"])]),
  number: z.number(), int: z.int(), int32: z.int32(), uint32: z.uint32(), float32: z.float32(), float64: z.float64(),
  safeInt: z.number().int(), gt: z.number().gt(5), gte: z.number().gte(5), lt: z.number().lt(0.1), lte: z.number().lte(-2.5),
  between: z.number().gt(0).lt(0.1), positive: z.number().positive(), nonnegative: z.number().nonnegative(), negative: z.number().negative(),
  nonpositive: z.number().nonpositive(), multipleOf: z.number().multipleOf(5), step: z.number().step(0.01),
  half: z.number().multipleOf(0.5), boolean: z.boolean(), null: z.null(), any: z.any(), unknown: z.unknown(), never: z.never(),
  literal: z.literal("a"), literals: z.literal(["a", 1, true, null]), enum: z.enum(["a", "b"]),
  nativeEnum: z.enum({ A: "a", B: 1 }), array: z.array(z.string()), minItems: z.array(z.int()).min(1).max(3),
  nonempty: z.array(z.int()).nonempty(), tuple: z.tuple([z.string(), z.int()]), tupleRest: z.tuple([z.string()]).rest(z.boolean()),
  object: z.object({ a: z.string(), b: z.int().optional() }), strictObject: z.strictObject({ a: z.string() }),
  looseObject: z.looseObject({ a: z.string() }), catchall: z.object({ a: z.int() }).catchall(z.string()),
  partial: z.object({ a: z.int(), b: z.int() }).partial(), extend: z.object({ a: z.int() }).extend({ b: z.string() }),
  record: z.record(z.string(), z.int()), recordEnum: z.record(z.enum(["a", "b"]), z.int()),
  partialRecord: z.partialRecord(z.enum(["a", "b"]), z.int()), recordPattern: z.record(z.string().regex(/^k_/), z.int()),
  recordNumber: z.record(z.number(), z.string()), looseRecord: z.looseRecord?.(z.string().regex(/_x$/), z.int()),
  union: z.union([z.string(), z.int()]), xor: z.xor?.([z.string(), z.int()]),
  discriminatedUnion: z.discriminatedUnion("t", [z.object({ t: z.literal("a"), x: z.int() }), z.object({ t: z.literal("b") })]),
  intersection: z.intersection(z.object({ a: z.int() }), z.object({ b: z.string() })),
  optional: z.object({ a: z.optional(z.string()) }), nullable: z.nullable(z.string()), nullish: z.object({ a: z.nullish(z.int()) }),
  default: z.object({ a: z.string().default("x") }), prefault: z.object({ a: z.string().prefault("x") }), catch: z.string().catch("x"),
  readonly: z.object({ a: z.int() }).readonly(), brand: z.string().brand("B"), describe: z.string().describe("text"),
  meta: z.string().meta({ title: "T", examples: ["x"], deprecated: true }), refine: z.string().refine(() => true),
  superRefine: z.array(z.int()).superRefine(() => {}), pipe: z.string().pipe(z.string().min(1)), coerceNumber: z.coerce.number(),
  coerceString: z.coerce.string(), coerceBoolean: z.coerce.boolean(), lazy: z.lazy(() => z.string()), recursive: Category,
  json: z.json(), stringbool: z.stringbool(), file: z.file(), promise: z.promise(z.string()), date: z.date(), bigint: z.bigint(),
  map: z.map(z.string(), z.int()), set: z.set(z.string()), symbol: z.symbol(), undefined: z.undefined(), void: z.void(), nan: z.nan(),
  transform: z.string().transform((s) => s.length), nonoptional: z.nonoptional(z.string().optional()), keyof: z.keyof(z.object({ a: z.int(), b: z.int() })),
};
const write = (generator, version, type, schema) => console.log(JSON.stringify({ generator, version, type, schema }));
const zodVersion = version("zod");
for (const [name, type] of Object.entries(zods)) {
  if (!type) continue;
  const seen = new Set();
  for (const target of ["draft-2020-12", "draft-7", "draft-4", "openapi-3.0"]) for (const io of ["input", "output"]) {
    const schema = z.toJSONSchema(z.object({ value: type }), { target, io, unrepresentable: "any" });
    const text = JSON.stringify({ ...schema, $schema: undefined });
    if (seen.has(text)) continue;
    seen.add(text);
    write("zod", zodVersion, `${name} ${target} ${io}`, schema);
  }
}
// Without RegExp, Date and Uint8Array, whose types are not those of JSON schemas.
const boxes = {
  Any: Type.Any(), Unknown: Type.Unknown(), String: Type.String(), Pattern: Type.String({ pattern: "^x" }), Email: Type.String({ format: "email" }),
  Number: Type.Number(), Bounds: Type.Number({ exclusiveMinimum: 0, maximum: 1 }), Integer: Type.Integer({ minimum: 0 }), Boolean: Type.Boolean(),
  Null: Type.Null(), Literal: Type.Literal("a"), Array: Type.Array(Type.Number()), Unique: Type.Array(Type.Integer(), { uniqueItems: true }),
  Contains: Type.Array(Type.Integer(), { contains: Type.Literal(1), minContains: 1 }), Object: Type.Object({ a: Type.Number(), b: Type.Optional(Type.String()) }),
  Closed: Type.Object({ a: Type.Number() }, { additionalProperties: false }), Tuple: Type.Tuple([Type.Number(), Type.String()]), EmptyTuple: Type.Tuple([]),
  Enum: Type.Enum({ A: "a", B: 2 }), Union: Type.Union([Type.String(), Type.Number()]), Literals: Type.Union([Type.Literal("a"), Type.Literal("b")]),
  Intersect: Type.Intersect([Type.Object({ a: Type.Number() }), Type.Object({ b: Type.Number() })]),
  IntersectClosed: Type.Intersect([Type.Object({ a: Type.Number() }), Type.Object({ b: Type.Number() })], { unevaluatedProperties: false }),
  Composite: Type.Composite([Type.Object({ a: Type.Number() }), Type.Object({ b: Type.Number() })]), Never: Type.Never(), Not: Type.Not(Type.String()),
  Record: Type.Record(Type.String(), Type.Number()), RecordPattern: Type.Record(Type.String({ pattern: "^a" }), Type.Number()),
  RecordNumber: Type.Record(Type.Number(), Type.String()), Partial: Type.Partial(Type.Object({ a: Type.Number() })), Required: Type.Required(Type.Object({ a: Type.Optional(Type.Number()) })),
  Pick: Type.Pick(Type.Object({ a: Type.Number(), b: Type.Number() }), ["a"]), Omit: Type.Omit(Type.Object({ a: Type.Number(), b: Type.Number() }), ["a"]),
  KeyOf: Type.KeyOf(Type.Object({ a: Type.Number(), b: Type.Number() })), TemplateLiteral: Type.TemplateLiteral("x${1|2}y"),
  Recursive: Type.Recursive((This) => Type.Object({ id: Type.String(), nodes: Type.Array(This) })),
  Unsafe: Type.Unsafe({ type: "string", enum: ["a", "b"] }), Deref: Type.Object({ a: Type.Ref("T") }, { $defs: { T: Type.String({ $id: "T" }) } }),
};
const boxVersion = version("@sinclair/typebox");
for (const [name, type] of Object.entries(boxes))
  write("typebox", boxVersion, name, JSON.parse(JSON.stringify(Type.Object({ value: type }))));
