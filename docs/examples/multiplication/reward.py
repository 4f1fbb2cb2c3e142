"""1 where the first line of a completion is the product."""


def product(completions: list[str], answer: list[str], **kwargs: object) -> list[float]:
    return [float(text.split("\n")[0].strip() == right) for text, right in zip(completions, answer, strict=True)]
