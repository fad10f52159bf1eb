"""Chat templates of the kinds that models have, written for the tests."""

_FIRST = "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
_FIRST += "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
_ALTERNATE = (
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
)

TEMPLATES = {
    "qwen": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama 3": "{{ bos_token }}" + _FIRST + "{{ '<|start_header_id|>system<|end_header_id|>\n\n' }}"
    "{{ 'Cutting Knowledge Date: December 2023\n\n' + system + '<|eot_id|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    "gemma": "{{ bos_token }}" + _FIRST + "{% for m in messages %}" + _ALTERNATE + "{{ '<start_of_turn>' + ('model' if "
    "m['role'] == 'assistant' else m['role']) + '\n' + (system + '\n\n' if loop.first and system else '') }}"
    "{{ m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    "mistral": "{{ bos_token }}{% for m in messages %}" + _ALTERNATE + "{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}",
    "mistral 3": "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ '[SYSTEM_PROMPT]' + m['content'] + '[/SYSTEM_PROMPT]' }}{% elif m['role'] == 'user' %}"
    "{{ '[INST]' + m['content'] + '[/INST]' }}{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}",
    "vicuna": "{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] + ' ' }}"
    "{% elif m['role'] == 'user' %}{{ 'USER: ' + m['content'] + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}",
}
REASONING = {
    "thinking dropped": "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' + "
    "m.content.split('</think>')[-1] + '<|im_end|>\n' }}{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + "
    "'<|im_end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% else %}"
    "{{ '<think>\n' }}{% endif %}{% endif %}",
    "channels": "{% for tool in tools or [] %}{{ '<|start_header_id|>' + tool.name + '<|eot_id|>' }}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|start_header_id|>final<|end_header_id|>' + m.content + "
    "'<|eot_id|>' }}{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>' }}{% endif %}",
}
"""Templates whose past answers are not the generation prompt and what was written."""
MARKS = "<|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|> <|eot_id|> <start_of_turn> <end_of_turn>".split()
