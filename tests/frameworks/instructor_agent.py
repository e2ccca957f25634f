# /// script
# dependencies = ["instructor==1.17.0"]
# ///
"""Instructor: typed answers, asked again where they do not fit, and a partial stream of them."""

import instructor
from pydantic import BaseModel, field_validator


class User(BaseModel):
    name: str
    age: int

    @field_validator("age")
    @classmethod
    def is_old(cls, age: int) -> int:
        if age < 0:
            raise ValueError("nobody is younger than 0")
        return age


def answer(question: str) -> dict:
    client = instructor.from_provider("openai/gpt-4o-mini")
    user = client.chat.completions.create(
        response_model=User, max_retries=3, messages=[{"role": "user", "content": question}]
    )
    partial = client.chat.completions.create_partial(
        response_model=User, messages=[{"role": "user", "content": f"Repeat: {user.name}, {user.age}"}]
    )
    *_, last = partial
    return {"text": f"{last.name} {last.age}"}
