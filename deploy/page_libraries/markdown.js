// The parser of Markdown; the page makes elements of its tokens, and never calls its renderer of HTML.
export { default as MarkdownIt } from "markdown-it";
