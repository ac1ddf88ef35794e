{{/* ringserve's configuration. What other objects of this chart rely on stands last and wins. */}}
{{- define "ringserve.config" -}}
{{- include "ringserve.validate" . }}
{{- $defaults := dict
    "gateway" (dict "max_seconds" .Values.gateway.maxSeconds)
    "timeouts" (dict "start" .Values.timeouts.start)
    "prefill" (merge (deepCopy .Values.prefill.config) (dict "threads_per_rank" (int .Values.prefill.threadsPerRank)))
    "decode" (merge (deepCopy .Values.decode.config) (dict "threads_per_rank" (int .Values.decode.threadsPerRank)))
}}
{{- $rings := dict "prefill" dict "decode" dict }}
{{- $further := dict "prefill" dict "decode" dict }}
{{- range $pool := include "ringserve.pools" . | fromJsonArray }}
{{- $size := include "ringserve.poolConfig" $pool | fromJson }}
{{- if $pool.name }}
{{- $own := dict "threads_per_rank" (int $pool.values.threadsPerRank) "resource" (printf "ringserve-%s" $pool.group) }}
{{- $_ := set (index $further $pool.role) $pool.name (merge $own $size) }}
{{- else }}
{{- $_ := set $rings $pool.role $size }}
{{- end }}
{{- end }}
{{- $fixed := dict
    "model" (dict "path" .Values.model.path "dtype" .Values.model.dtype "device" .Values.model.device)
    "prefill" (merge (dict "pools" $further.prefill) $rings.prefill)
    "decode" (merge (dict "pools" $further.decode) $rings.decode)
    "router" (dict "listen" (printf "0.0.0.0:%s" (include "ringserve.port.router" .)))
    "gateway" (dict "insecure" true "http" "" "listen" (printf "0.0.0.0:%s" (include "ringserve.port.gateway" .)) "metrics" (printf "0.0.0.0:%s" (include "ringserve.port.gatewayMetrics" .)))
    "metrics" (dict
        "router" (printf "0.0.0.0:%s" (include "ringserve.port.routerMetrics" .))
        "prefill" (printf "0.0.0.0:%s" (include "ringserve.port.prefillMetrics" .))
        "decode" (printf "0.0.0.0:%s" (include "ringserve.port.decodeMetrics" .))
        "also_as" (ternary "vllm" "" .Values.metrics.vllmNames))
    "ray" (dict "address" "auto" "prefill_resource" "ringserve-prefill" "decode_resource" "ringserve-decode")
}}
{{- toYaml (mergeOverwrite $defaults (deepCopy .Values.config) $fixed) }}
{{- end }}
