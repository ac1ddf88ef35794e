{{/* Section internal_tls: mutual TLS between ringserve's processes, with the secret that every pod mounts. */}}
{{- define "ringserve.internalTls" -}}
cert: /etc/ringserve-internal/tls.crt
key: /etc/ringserve-internal/tls.key
ca: /etc/ringserve-internal/ca.crt
server_name: {{ .Values.internalTls.serverName | quote }}
allow_plain_ring: {{ .Values.internalTls.allowPlainRing }}
allow_plain_kv: {{ .Values.internalTls.allowPlainKv }}
insecure: {{ .Values.internalTls.insecure }}
{{- end }}

{{/* Configuration of ringserve. Values that other objects of the chart rely on come last and override the others. */}}
{{- define "ringserve.config" -}}
{{- include "ringserve.validate" . }}
{{- $defaults := dict
    "gateway" (dict "max_seconds" .Values.gateway.maxSeconds)
    "timeouts" (dict "start" .Values.timeouts.start)
    "kv_transfer" (dict "carrier" .Values.kvTransfer.carrier "slot_bytes" (int .Values.kvTransfer.slotBytes))
    "logs" (dict "level" .Values.logs.level "levels" .Values.logs.levels "format" .Values.logs.format)
    "router" (ternary (dict "journal" "/var/lib/ringserve/journal") dict (not (empty .Values.head.journalVolume)))
    "prefill" (merge (deepCopy .Values.prefill.config) (dict "threads_per_rank" (int .Values.prefill.threadsPerRank)))
    "decode" (merge (deepCopy .Values.decode.config) (dict "threads_per_rank" (int .Values.decode.threadsPerRank)))
}}
{{- $internalTls := dict "insecure" .Values.internalTls.insecure }}
{{- if .Values.internalTls.secretName }}
{{- $internalTls = include "ringserve.internalTls" . | fromYaml }}
{{- end }}
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
    "internal_tls" $internalTls
    "model" (dict "path" .Values.model.path "dtype" .Values.model.dtype "device" .Values.model.device)
    "prefill" (merge (dict "pools" $further.prefill) $rings.prefill)
    "decode" (merge (dict "pools" $further.decode) $rings.decode)
    "router" (dict "listen" (printf "0.0.0.0:%s" (include "ringserve.port.router" .)))
    "gateway" (dict "insecure" true "http" ""
        "listen" (printf "0.0.0.0:%s" (include "ringserve.port.gateway" .))
        "metrics" (printf "0.0.0.0:%s" (include "ringserve.port.gatewayMetrics" .)))
    "metrics" (dict
        "router" (printf "0.0.0.0:%s" (include "ringserve.port.routerMetrics" .))
        "prefill" (printf "0.0.0.0:%s" (include "ringserve.port.prefillMetrics" .))
        "decode" (printf "0.0.0.0:%s" (include "ringserve.port.decodeMetrics" .))
        "also_as" (ternary "vllm" "" .Values.metrics.vllmNames))
    "tracing" (dict "endpoint" .Values.tracing.endpoint "sample_ratio" (float64 .Values.tracing.sampleRatio))
    "ray" (dict "address" "auto" "prefill_resource" "ringserve-prefill" "decode_resource" "ringserve-decode")
}}
{{- toYaml (mergeOverwrite $defaults (deepCopy .Values.config) $fixed) }}
{{- end }}
