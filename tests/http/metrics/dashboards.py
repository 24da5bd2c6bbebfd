"""The series that dashboards, gateways and autoscalers made for other servers select, with their label matchers."""

import re

# Every series of vLLM's Grafana dashboard (examples/observability/prometheus_grafana/grafana.json@4b5c627c).
VLLM_DASHBOARD = (
    "vllm:e2e_request_latency_seconds_bucket{model_name}",
    "vllm:e2e_request_latency_seconds_sum{model_name}",
    "vllm:e2e_request_latency_seconds_count{model_name}",
    "vllm:prompt_tokens_total{model_name}",
    "vllm:generation_tokens_total{model_name}",
    "vllm:inter_token_latency_seconds_bucket{model_name}",
    "vllm:inter_token_latency_seconds_sum{model_name}",
    "vllm:inter_token_latency_seconds_count{model_name}",
    "vllm:num_requests_running{model_name}",
    "vllm:num_requests_waiting{model_name}",
    "vllm:time_to_first_token_seconds_bucket{model_name}",
    "vllm:time_to_first_token_seconds_sum{model_name}",
    "vllm:time_to_first_token_seconds_count{model_name}",
    "vllm:kv_cache_usage_perc{model_name}",
    "vllm:request_prompt_tokens_bucket{model_name}",
    "vllm:request_generation_tokens_bucket{model_name}",
    "vllm:request_success_total{model_name,finished_reason}",
    "vllm:request_queue_time_seconds_sum{model_name}",
    "vllm:request_prefill_time_seconds_sum{model_name}",
    "vllm:request_decode_time_seconds_sum{model_name}",
    "vllm:request_max_num_generation_tokens_sum{model_name}",
)
# Read by the Kubernetes gateway's endpoint picker, KEDA's scaled object, AIPerf and the production stack's dashboards.
VLLM_OTHERS = (
    "vllm:cache_config_info{block_size,num_gpu_blocks}",
    "vllm:num_preemptions_total{model_name}",
    "vllm:prefix_cache_queries_total{model_name}",
    "vllm:prefix_cache_hits_total{model_name}",
    "vllm:gpu_cache_usage_perc{model_name}",
    "vllm:gpu_prefix_cache_queries_total{model_name}",
    "vllm:gpu_prefix_cache_hits_total{model_name}",
    "vllm:time_per_output_token_seconds_bucket{model_name}",
    "vllm:request_time_per_output_token_seconds_bucket{model_name}",
    "vllm:request_inference_time_seconds_bucket{model_name}",
    "vllm:request_params_max_tokens_bucket{model_name}",
)
# Every series of TGI's Grafana dashboard (assets/tgi_grafana.json@db931fcf); the scrape adds the label `container`.
TGI_DASHBOARD = (
    "tgi_batch_concat{reason}",
    "tgi_batch_concat_duration_bucket{method=decode}",
    "tgi_batch_current_max_tokens",
    "tgi_batch_current_size",
    "tgi_batch_decode_duration_bucket{method=decode}",
    "tgi_batch_filter_duration_bucket{method=decode}",
    "tgi_batch_forward_duration_bucket{method=decode}",
    "tgi_batch_inference_duration_bucket{method=decode}",
    "tgi_batch_inference_duration_bucket{method=prefill}",
    "tgi_queue_size",
    "tgi_request_count",
    "tgi_request_duration_bucket",
    "tgi_request_failure{err}",
    "tgi_request_generated_tokens_bucket",
    "tgi_request_generated_tokens_count",
    "tgi_request_generated_tokens_sum",
    "tgi_request_input_length_bucket",
    "tgi_request_mean_time_per_token_duration_bucket",
    "tgi_request_queue_duration_bucket",
    "tgi_request_skipped_tokens_bucket",
    "tgi_request_success",
)


def resolve(selector, samples):
    """Return the samples that a selector matches. A label without a value must be present and not be empty."""
    name, labels = re.fullmatch(r"([a-z_:0-9]+)(?:\{(.*)\})?", selector).groups()
    matchers = [label.partition("=")[::2] for label in (labels or "").split(",") if label]
    return [
        sample
        for sample in samples
        if sample.name == name
        and all(
            sample.labels.get(key) and value in ("", sample.labels[key]) for key, value in matchers
        )
    ]
