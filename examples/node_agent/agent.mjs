// A text-to-SQL agent in JavaScript. It knows of no training: the client reads OPENAI_BASE_URL and OPENAI_API_KEY.
import OpenAI from "openai";
import { text } from "node:stream/consumers";

const client = new OpenAI();
const { schema, question } = JSON.parse(await text(process.stdin));
const prompt = `Write one SQLite query that answers the question.\n${schema}\nQuestion: ${question}\nAnswer with SQL only.`;

const stream = client.chat.completions.stream({ model: "gpt-4o-mini", messages: [{ role: "user", content: prompt }] });
const query = (await stream.finalChatCompletion()).choices[0].message.content.trim();

console.log(JSON.stringify(query));
