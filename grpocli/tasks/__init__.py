"""Tasks: where prompts come from.

A row of data becomes a prompt in these steps:

    loading.py        a file, a folder, an address or a dataset of the hub -> rows
    streaming.py      instead of a whole table, rows that are read as they are drawn
    dataset.py        a row -> an example, with `prompt` and further columns: templates, processor, worked examples;
                      the rows that are held out for evaluation
    prompts.py        an example -> a `Prompt`: chat template, token ids, limit of length
    curriculum.py     the example of each draw, and the task of each draw in a mixture
    prompt_source.py  all tasks of a run: `draw(number)` -> a `Prompt`

A task is one class with `@part("task", NAME)` and a method `examples(split)`. `Gsm8k` derives from `Jsonl` and only
names its data; `Countdown` derives from `Generated` and makes its examples from a seed.
"""
