"""Chat templates of published models, reduced to the lines that render messages, calls and reasoning."""

_DEEPSEEK_CALL = (
    "'<|call|>' + tool['type'] + '<|sep|>' + tool['function']['name'] + '\\n```json\\n' "
    "+ tool['function']['arguments'] + '\\n```<|/call|>'"
)
_HEADER = "{{ '<|im_start|>' + message.role + '\\n' }}"
_QWEN_CALLS = (
    "{% for tool_call in message.tool_calls %}{% if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}"
    '{{ \'\\n<tool_call>\\n{"name": "\' + tool_call.name + \'", "arguments": \' }}'
)

TEMPLATES = {
    # SmolLM2 and most fine-tunes: any role, no calls.
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "deepseek_r1": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}{% endif %}"
        "{% if message['role'] == 'assistant' and message['content'] is none %}{{ '<|Assistant|><|calls|>' }}"
        f"{{% for tool in message['tool_calls'] %}}{{{{ {_DEEPSEEK_CALL} }}}}{{% endfor %}}"
        "{{ '<|/calls|>' + eos_token }}{% endif %}"
        "{% if message['role'] == 'assistant' and message['content'] is not none %}"
        "{% set content = message['content'] %}"
        "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
        "{{ '<|Assistant|>' + content + eos_token }}{% endif %}"
        "{% if message['role'] == 'tool' %}{{ '<|output|>' + message['content'] + '<|/output|>' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"
    ),
    "deepseek_v3": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}{% endif %}"
        "{% if message['role'] == 'assistant' and 'tool_calls' in message %}"
        "{% if message['content'] is none %}{{ '<|Assistant|><|calls|>' }}"
        "{% else %}{{ '<|Assistant|>' + message['content'] + '<|calls|>' }}{% endif %}"
        f"{{% for tool in message['tool_calls'] %}}{{{{ {_DEEPSEEK_CALL} }}}}{{% endfor %}}"
        "{{ '<|/calls|>' + eos_token }}{% endif %}"
        "{% if message['role'] == 'assistant' and 'tool_calls' not in message %}"
        "{{ '<|Assistant|>' + message['content'] + eos_token }}{% endif %}"
        "{% if message['role'] == 'tool' %}{{ '<|output|>' + message['content'] + '<|/output|>' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"
    ),
    "deepseek_v31": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}{% endif %}"
        "{% if message['role'] == 'assistant' and message['tool_calls'] is defined and message['tool_calls'] is not none %}"
        "{{ '<|Assistant|></think>' }}{% for tool in message['tool_calls'] %}"
        "{% if loop.first and message['content'] is not none %}{{ message['content'] + '<|calls|>' }}"
        "{% elif loop.first %}{{ '<|calls|>' }}{% endif %}"
        "{{ '<|call|>' + tool['function']['name'] + '<|sep|>' + tool['function']['arguments'] + '<|/call|>' }}{% endfor %}"
        "{{ '<|/calls|>' + eos_token }}{% endif %}"
        "{% if message['role'] == 'assistant' and (message['tool_calls'] is not defined or message['tool_calls'] is none) %}"
        "{{ '<|Assistant|></think>' + message['content'] + eos_token }}{% endif %}"
        "{% if message['role'] == 'tool' %}{{ '<|output|>' + message['content'] + '<|/output|>' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|Assistant|><think>' }}{% endif %}"
    ),
    "functionary_v31": (
        "{{ bos_token }}{% for message in messages %}"
        "{{ '<|start_header_id|>' + ('ipython' if message['role'] == 'tool' else message['role']) + '<|end_header_id|>\\n\\n' }}"
        "{% if message['content'] %}{{ message['content'] }}{% endif %}"
        "{% if message['tool_calls'] is defined and message['tool_calls'] %}{% for call in message['tool_calls'] %}"
        "{{ '<function=' + call['function']['name'] + '>' + call['function']['arguments'] + '</function>' }}"
        "{% endfor %}{{ '<|eom_id|>' }}{% else %}{{ '<|eot_id|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
    ),
    # The operator `~` writes an object in Python's notation instead of failing.
    "tilde": (
        "{% for message in messages %}{{ '[' ~ message.role ~ ']' }}{{ message.content or '' }}"
        "{% for call in message.tool_calls or [] %}{{ '<' ~ call.function.name ~ '>' ~ call.function.arguments ~ '</>' }}"
        "{% endfor %}{% endfor %}"
    ),
    "hermes": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if message.role == 'user' or message.role == 'system' or (message.role == 'assistant' and message.tool_calls is not defined) %}"
        "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
        f"{{% elif message.role == 'assistant' %}}{_HEADER}"
        '{% for tool_call in message.tool_calls %}{{ \'<tool_call>\\n{"name": "\' + tool_call.function.name + \'", "arguments": \' }}'
        "{{ tool_call.function.arguments|tojson }}{{ '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}"
        "{% elif message.role == 'tool' %}{{ '<tool_response>\\n' + message.content + '\\n</tool_response>' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "qwen25": (
        "{% for message in messages %}"
        "{% if message.role == 'user' or message.role == 'system' or (message.role == 'assistant' and not message.tool_calls) %}"
        "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
        "{% elif message.role == 'assistant' %}{{ '<|im_start|>' + message.role }}"
        "{% if message.content %}{{ '\\n' + message.content }}{% endif %}"
        f"{_QWEN_CALLS}{{{{ tool_call.arguments | tojson }}}}{{{{ '}}\\n</tool_call>' }}}}{{% endfor %}}"
        "{{ '<|im_end|>\\n' }}{% elif message.role == 'tool' %}"
        "{{ '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "qwen3": (
        "{% for message in messages %}{% if message.content is string %}{% set content = message.content %}"
        "{% else %}{% set content = '' %}{% endif %}"
        "{% if message.role == 'user' or (message.role == 'system' and loop.first) %}"
        "{{ '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}"
        "{% elif message.role == 'assistant' %}{% set reasoning_content = '' %}"
        "{% if message.reasoning_content is string %}{% set reasoning_content = message.reasoning_content %}"
        "{% elif '</think>' in content %}"
        "{% set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
        "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
        "{% if loop.last or reasoning_content %}"
        "{{ '<|im_start|>assistant\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}"
        "{% else %}{{ '<|im_start|>assistant\\n' + content }}{% endif %}"
        f"{_QWEN_CALLS}{{% if tool_call.arguments is string %}}{{{{ tool_call.arguments }}}}"
        "{% else %}{{ tool_call.arguments | tojson }}{% endif %}{{ '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}"
        "{% elif message.role == 'tool' %}"
        "{{ '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "llama31": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}"
        "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}"
        "{% elif 'tool_calls' in message %}{% if not message.tool_calls | length == 1 %}"
        "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
        "{% set tool_call = message.tool_calls[0].function %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
        "{{ '{\"name\": \"' + tool_call.name + '\", \"parameters\": ' }}{{ tool_call.arguments | tojson }}{{ '}<|eot_id|>' }}"
        "{% else %}{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
    ),
    "mistral_nemo": (
        "{{ bos_token }}{% set ns = namespace(index=0) %}{% for message in messages %}"
        "{% if not (message.role == 'tool' or (message.tool_calls is defined and message.tool_calls is not none)) %}"
        "{% if (message['role'] == 'user') != (ns.index % 2 == 0) %}"
        "{{ raise_exception('After the optional system message, conversation roles must alternate user/assistant') }}"
        "{% endif %}{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}{% for message in messages %}"
        "{% if message['role'] == 'user' %}{{ '[INST]' + message['content'] + '[/INST]' }}"
        "{% elif message.tool_calls is defined and message.tool_calls is not none %}{{ '[TOOL_CALLS][' }}"
        "{% if message.tool_calls | length == 0 %}{{ raise_exception('no calls') }}{% endif %}"
        "{% for tool_call in message.tool_calls %}{% set out = tool_call.function|tojson %}{{ out[:-1] }}"
        "{% if not tool_call.id is defined or tool_call.id|length != 9 %}"
        "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
        "{{ ', \"id\": \"' + tool_call.id + '\"}' }}{% endfor %}{{ ']' + eos_token }}"
        "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content']|trim + eos_token }}"
        "{% elif message['role'] == 'tool' %}{{ '[TOOL_RESULTS]' + message.content|string + '[/TOOL_RESULTS]' }}"
        "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
    ),
    "glm45": (
        "[gMASK]<sop>{% for message in messages %}{% if message.role == 'user' %}{{ '<|user|>\\n' + message.content }}"
        "{% elif message.role == 'assistant' %}{{ '<|assistant|>' }}"
        "{% if message.reasoning_content is string %}{{ '\\n<think>' + message.reasoning_content.strip() + '</think>' }}{% endif %}"
        "{% if message.content %}{{ '\\n' + message.content.strip() }}{% endif %}"
        "{% for tc in message.tool_calls or [] %}{{ '\\n<tool_call>' + tc.function.name }}"
        "{% for k, v in tc.function.arguments.items() %}{{ '\\n<arg_key>' + k + '</arg_key>\\n<arg_value>' }}"
        "{{ v | tojson if v is not string else v }}{{ '</arg_value>' }}{% endfor %}{{ '\\n</tool_call>' }}{% endfor %}"
        "{% elif message.role == 'tool' %}{{ '<|observation|>\\n' + message.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    ),
    # Roles alternate and texts are trimmed: null would be written as "None".
    "gemma2": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' "
        "+ message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
    ),
    "gpt_oss": (
        "{{ '<|start|>system<|message|>You are ChatGPT.<|end|>' }}{% for message in messages %}"
        "{% if message.role == 'developer' or message.role == 'system' %}"
        "{% if loop.first %}{{ '<|start|>developer<|message|># Instructions\\n\\n' + message.content + '<|end|>' }}{% endif %}"
        "{% elif message.role == 'user' %}{{ '<|start|>user<|message|>' + message.content + '<|end|>' }}"
        "{% elif message.role == 'tool' %}{{ '<|start|>functions to=assistant<|message|>' + message.content|tojson + '<|end|>' }}"
        "{% elif message.role == 'assistant' %}{% if 'thinking' in message and message.thinking %}"
        "{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{% endif %}"
        "{% if message.tool_calls %}{% set tool_call = message.tool_calls[0].function %}"
        "{{ '<|start|>assistant to=functions.' + tool_call.name + '<|channel|>commentary json<|message|>' }}"
        "{{ tool_call.arguments|tojson }}{{ '<|call|>' }}"
        "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{% endif %}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
    ),
    "llama2": (
        "{% for message in messages %}{% if message['role'] == 'user' %}"
        "{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "zephyr": (
        "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|user|>\\n' + message['content'] + eos_token }}"
        "{% elif message['role'] == 'system' %}{{ '<|system|>\\n' + message['content'] + eos_token }}"
        "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>\\n' + message['content'] + eos_token }}{% endif %}\n"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}{% endfor %}"
    ),
    # Arguments that are no object vanish, and null becomes text; the word for it is in the instructions too.
    "minimax_m2": (
        "{% macro visible(content) %}{% if content is string %}{{ content }}{% else %}{{ content }}{% endif %}{% endmacro %}"
        "]~b]system\nAnswer None if you do not know.[e~[\n{% for message in messages %}"
        "{% if message.role == 'assistant' %}{% set content = visible(message.content) %}{{ ']~b]ai\n' }}"
        "{% if message.reasoning_content is string %}{{ '<think>\n' ~ message.reasoning_content ~ '\n</think>\n\n' }}{% endif %}"
        "{% if content %}{{ content }}{% endif %}"
        "{% for call in message.tool_calls or [] %}{{ '\n<invoke name=\"' + call.function.name + '\">' }}"
        "{% if call.function.arguments is mapping %}{% for k, v in call.function.arguments|items %}"
        "{{ '<parameter name=\"' + k + '\">' }}{{ v | tojson if v is not string else v }}{{ '</parameter>' }}{% endfor %}{% endif %}"
        "{{ '</invoke>' }}{% endfor %}{{ '[e~[\n' }}"
        "{% else %}{{ ']~b]' ~ message.role ~ '\n' ~ visible(message.content) ~ '[e~[\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ ']~b]ai\n<think>\n' }}{% endif %}"
    ),
    # Writes what is no text as JSON, and no calls.
    "lfm2": (
        "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% set content = message.content %}"
        "{% if content is not string %}{% set content = content | tojson %}{% endif %}{{ content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    # A reminder follows the last answer.
    "text_behind": (
        "{% for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}"
        "{{ 'Answer in the language of the user: ' + messages[0].content }}"
    ),
}
