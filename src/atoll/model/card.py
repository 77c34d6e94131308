"""The README of a model folder: what it is and how it is loaded."""

from pathlib import Path

from atoll.config.model import ModelConfig, parameter_count
from atoll.files import write_bytes

_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [llama, atoll]
---

# {name}

A causal language model of the Llama architecture with {parameters:,} parameters:
{layers} layers of width {width}, {heads} heads ({keys} for keys and values), FFN width {ffn},
vocabulary {vocabulary:,}, context {context:,} tokens. It needs no remote code.

```python
from transformers import {classes}

model = AutoModelForCausalLM.from_pretrained("{name}"){tokenizer}
```
"""


def write_card(path: Path, config: ModelConfig, *, name: str, has_tokenizer: bool) -> None:
    """Write a short model card.

    Args:
        path: The README.md to write.
        config: The shape of the model.
        name: What the folder will be called.
        has_tokenizer: Whether the folder also holds a tokenizer.
    """
    text = _CARD.format(
        name=name,
        parameters=parameter_count(config),
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        keys=config.kv_heads or config.heads,
        ffn=config.ffn_width,
        vocabulary=config.vocab_size,
        context=config.context_length,
        classes="AutoModelForCausalLM" + (", AutoTokenizer" if has_tokenizer else ""),
        tokenizer=f'\ntokenizer = AutoTokenizer.from_pretrained("{name}")' if has_tokenizer else "",
    )
    write_bytes(path, text.encode())
