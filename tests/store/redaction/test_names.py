"""Names of secrets are told from names that only look like them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollbook.ingest.fields import SamplingFields
from rollbook.store.redaction import conversation, is_secret_name, replace_outside


def _words(text: str) -> list[str]:
    return text.split()


SECRETS = _words("""
authorization Authorization proxy-authorization x-api-key X-Api-Key api_key api-key apikey API_KEY apiKey
OPENAI_API_KEY openaiApiKey api_keys api_key_2 token access_token accessToken authtoken refresh_token id_token
authorization_token github_token GITHUB_TOKEN hf_token apiToken session_token csrf_token access_tokens
token_value password Password db_password DB_PASSWORD dbpassword passwords passwd passphrase pwd password2
secret client_secret clientSecret secrets aws_secret_access_key AWS_ACCESS_KEY_ID access_key private_key
privateKey cookie Cookie set-cookie Set-Cookie session_cookie cookies credential credentials bearer jwt auth
basic_auth x-goog-api-key ocp-apim-subscription-key X-Amz-Security-Token
""")
OTHERS = _words("""
max_tokens max_completion_tokens max_output_tokens max_new_tokens min_tokens tokens token_ids return_token_ids
prompt_token_ids prompt_tokens completion_tokens total_tokens token_count eos_token eos_token_id bos_token
pad_token stop_token_ids budget_tokens input_tokens output_tokens cache_creation_input_tokens cached_tokens
reasoning_tokens skip_special_tokens tokenizer tokenize logprobs top_logprobs token_logprobs token_type_ids
completion_tokens_details accepted_prediction_tokens truncate_prompt_tokens thinking_token_budget
allowed_token_ids bad_words_token_ids spaces_between_special_tokens add_special_tokens next_page_token
time_to_first_token tokens_per_second prompt_cache_key key keys key_id primary_key foreign_key sort_key
routing_key partition_key idempotency_key storage_key keyword monkey turkeys author authors secretary
cookie_name password_policy token_url token_type session_id user metadata trajectory_id
[secret:0123456789ab]
""")


@pytest.mark.parametrize("name", SECRETS)
def test_a_secrets_name(name: str) -> None:
    """In every spelling that APIs, headers and environments use."""
    assert is_secret_name(name)


@pytest.mark.parametrize("name", OTHERS)
def test_other_names_are_no_secrets(name: str) -> None:
    """Of a model's tokens, of keys that open nothing, and of what is said about a secret."""
    assert not is_secret_name(name)


FIELDS = _words("""
messages model audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens
max_tokens metadata modalities n parallel_tool_calls prediction presence_penalty prompt_cache_key
prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier stop store stream
stream_options temperature tool_choice tools top_logprobs top_p user verbosity web_search_options prompt
best_of echo suffix input instructions background conversation include max_output_tokens max_tool_calls
previous_response_id reasoning text truncation context_management system stop_sequences thinking top_k
container mcp_servers output_config inference_geo return_token_ids prompt_logprobs prompt_token_ids
skip_special_tokens spaces_between_special_tokens stop_token_ids min_tokens ignore_eos
include_stop_str_in_output truncate_prompt_tokens add_generation_prompt continue_final_message
add_special_tokens chat_template chat_template_kwargs documents guided_json guided_regex guided_choice
structured_outputs allowed_token_ids bad_words logits_processors request_id priority kv_transfer_params
cache_salt return_tokens_as_token_ids min_p repetition_penalty length_penalty use_beam_search vllm_xargs
separate_reasoning stream_reasoning lora_path session_params return_hidden_states custom_logit_processor
bootstrap_host bootstrap_port bootstrap_room data_parallel_rank rid input_ids no_stop_trim ebnf regex
choices output output_text content usage id object created system_fingerprint finish_reason stop_reason
stop_sequence role type token_ids index delta incomplete_details completed_at created_at status billing
prompt_tokens completion_tokens total_tokens prompt_tokens_details completion_tokens_details
input_tokens output_tokens input_tokens_details output_tokens_details cache_creation_input_tokens
cache_read_input_tokens cached_tokens audio_tokens reasoning_tokens accepted_prediction_tokens
rejected_prediction_tokens ephemeral_5m_input_tokens ephemeral_1h_input_tokens server_tool_use
token bytes logprob budget_tokens effort
""")


@pytest.mark.parametrize("name", sorted({*FIELDS, *SamplingFields.model_fields} - {"token"}))
def test_no_field_of_the_apis_is_a_secrets(name: str) -> None:
    """Chat, completions, Responses and Messages, and vLLM's and SGLang's; `token` is a logprob's."""
    assert not is_secret_name(name)


def test_no_recorded_event_has_one_outside_the_conversation(root: Path) -> None:
    """The golden logs hold requests and replies of real clients: none of their fields is a secret's."""
    looked = 0
    for file in sorted((root / "tests/data").glob("*.jsonl")):
        for line in file.read_text().splitlines():
            event = json.loads(line)
            for body in (event.get("request"), event.get("upstream")):
                if isinstance(body, dict):
                    looked += 1
                    replace_outside(
                        body, lambda name, value: pytest.fail(name) if is_secret_name(name) else value
                    )
    assert looked > 5


def test_a_tools_connection_is_outside_and_its_definition_is_not() -> None:
    """Only what stands beside the definition may be changed."""
    function = {"name": "login", "parameters": {"properties": {"password": {"type": "string"}}}}
    tools = [
        {"type": "function", "function": function},
        {"type": "mcp", "server_label": "x", "headers": {"a": "b"}, "server_url": "https://u:p@h"},
        "odd",
    ]
    body = {"model": "m", "messages": [], "tools": tools}
    seen: list[str] = []
    assert replace_outside(body, lambda name, value: seen.append(name) or value) is body
    assert seen == ["model", "server_label", "headers", "server_url"]
    changed = replace_outside(body, lambda name, value: "gone" if name == "headers" else value)
    assert changed["tools"] == [tools[0], tools[1] | {"headers": "gone"}, "odd"]
    assert conversation(changed) == conversation(body)
    assert conversation(body)["tools"][1:] == [{"type": "mcp"}, "odd"]
