// dependencies = ["@langchain/langgraph@1.7.3", "@langchain/openai@1.6.0", "langchain@1.5.14", "zod@4.6.7"]
// LangGraph.js: an agent with two tools, streamed.
import { ChatOpenAI } from "@langchain/openai";
import { createAgent, tool } from "langchain";
import { text } from "node:stream/consumers";
import { z } from "zod";

const question = JSON.parse(await text(process.stdin));
const options = (name, description) => ({ name, description, schema: z.object({ city: z.string() }) });
const getWeather = tool(({ city }) => `It is sunny in ${city}.`, options("get_weather", "The weather of a city."));
const bookTable = tool(
  ({ city }) => {
    throw new Error(`no table in ${city}`);
  },
  options("book_table", "Books a table outside."),
);
const model = new ChatOpenAI({ model: "gpt-4o-mini", configuration: { baseURL: process.env.OPENAI_BASE_URL } });
const agent = createAgent({ model, tools: [getWeather, bookTable], systemPrompt: "You plan evenings." });

const state = await agent.invoke({ messages: [{ role: "user", content: question }] });
console.log(JSON.stringify({ text: state.messages.at(-1).content }));
