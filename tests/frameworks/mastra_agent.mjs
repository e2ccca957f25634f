// dependencies = ["@mastra/core@1.71.0", "@ai-sdk/openai@4.0.118", "zod@4.6.7"]
// Mastra: an agent with two tools, and one that reviews; models by Vercel's provider.
import { createOpenAI } from "@ai-sdk/openai";
import { Agent } from "@mastra/core/agent";
import { createTool } from "@mastra/core/tools";
import { text } from "node:stream/consumers";
import { z } from "zod";

const question = JSON.parse(await text(process.stdin));
const model = createOpenAI({ baseURL: process.env.OPENAI_BASE_URL })("gpt-4o-mini");
const inputSchema = z.object({ city: z.string() });
const getWeather = createTool({
  id: "get_weather",
  description: "The weather of a city.",
  inputSchema,
  execute: async ({ city }) => `It is sunny in ${city}.`,
});
const bookTable = createTool({
  id: "book_table",
  description: "Books a table outside.",
  inputSchema,
  execute: async ({ city }) => {
    throw new Error(`no table in ${city}`);
  },
});
const planner = new Agent({
  id: "planner",
  name: "planner",
  instructions: "You plan evenings.",
  model,
  tools: { get_weather: getWeather, book_table: bookTable },
});
const reviewer = new Agent({ id: "reviewer", name: "reviewer", instructions: "You review plans.", model });

const plan = await planner.generate(question);
const review = await reviewer.generate(plan.text);
console.log(JSON.stringify({ text: review.text, calls: plan.steps.length + review.steps.length }));
