"""How a problem is put to a policy: the user's message of each recipe."""

from __future__ import annotations

from trm_jax.data._problem import Problem

__all__ = ["PROMPT_FORMATS", "format_prompt"]

PROMPT_FORMATS: dict[str, str] = {
    "question": "{question}",
    "boxed": "{question}\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "boxed_short": "{question}\nPlease put your final answer within \\boxed{}.",
    "hashes": '{question} Let\'s think step by step and output the final answer after "####".',
    "answer_line": (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{question}\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    ),
    "options": (
        "Answer the following multiple-choice question. Think step by step, and put the letter of your choice within "
        "\\boxed{}.\n\n{question}\n\n{choices}"
    ),
}
"""By name: ``boxed`` is the instruction of Qwen2.5-Math's evaluation, ``boxed_short`` AReaL's for GSM8K, ``hashes``
verl's for GSM8K, ``answer_line`` DAPO's (arXiv 2503.14476), in which DAPO-Math-17k comes wrapped. ``{question}`` is
replaced by the problem and ``{choices}`` by its lettered choices."""


def format_prompt(problem: Problem, prompt_format: str) -> str:
    """The user's message for a problem.

    Args:
      problem: its ``metadata["choices"]`` are the choices of a multiple-choice question.
      prompt_format: a name of ``PROMPT_FORMATS``, or a template of one's own that contains ``{question}``.

    Returns:
      The text.

    Raises:
      ValueError: neither; or a format that shows choices, for a problem that has none.

    Example:
      >>> problem = Problem(prompt="1+2?", reference="3", source="example", index=0)
      >>> format_prompt(problem, "boxed_short"), format_prompt(problem, "Q: {question} A:")
      ('1+2?\\nPlease put your final answer within \\\\boxed{}.', 'Q: 1+2? A:')
    """
    template = PROMPT_FORMATS.get(prompt_format, prompt_format)
    if "{question}" not in template:
        raise ValueError(
            f"there is no prompt format {prompt_format!r}: choose one of {', '.join(PROMPT_FORMATS)}, or give a "
            "template with {question} in it"
        )
    if "{choices}" in template:
        choices = problem.metadata.get("choices")
        if not choices:
            raise ValueError(f"problem {problem.name} has no choices, which prompt format {prompt_format!r} shows")
        lettered = "\n".join(f"({chr(ord('A') + place)}) {choice}" for place, choice in enumerate(choices))
        # The question goes in last: a brace in it, or in a choice, is text.
        before, after = template.split("{choices}", 1)
        return before.replace("{question}", problem.prompt) + lettered + after.replace("{question}", problem.prompt)
    return template.replace("{question}", problem.prompt)
