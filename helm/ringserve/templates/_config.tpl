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

{{/* The same as options of a command, for pods that do not mount the configuration. Empty without TLS. */}}
{{- define "ringserve.internalTlsOptions" -}}
{{- if .Values.internalTls.secretName }}
{{- $options := list }}
{{- range $key, $value := include "ringserve.internalTls" . | fromYaml }}
{{- $options = append $options (printf "--set=internal_tls.%s=%v" $key $value) }}
{{- end }}
{{- join " " $options }}
{{- end }}
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
{{- if and $.Values.ray.autoscaling.enabled $.Values.ray.autoscaling.byLoad (not (kindIs "invalid" $pool.values.minReplicas)) }}
{{- $others := sub (int (include "ringserve.numRings" (dict "root" $ "role" $pool.role))) (int $pool.values.replicas) }}
{{- $size = set $size "min_rings" (max 1 (add $others (int $pool.values.minReplicas))) }}
{{- end }}
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

{{/* What the head mounts at /etc/ringserve. */}}
{{- define "ringserve.configData" -}}
config.yaml: |
  {{- include "ringserve.config" . | nindent 2 }}
# Runs Ray's head beside the router and the leaders.
head.sh: |
  {{- .Files.Get "files/head.sh" | nindent 2 }}
{{- end }}

{{/* A name for each content: a container that restarts reads what its pod began with, and not what came since. */}}
{{- define "ringserve.configName" -}}
{{ include "ringserve.fullname" . }}-{{ include "ringserve.configData" . | sha256sum | trunc 8 }}
{{- end }}

{{/* Fields of the RayCluster's spec beside its groups; the user's come last. */}}
{{- define "ringserve.raySpec" -}}
{{- $spec := dict "rayVersion" .Values.ray.version }}
{{- if .Values.ray.tokenAuthentication }}
{{- $_ := set $spec "authOptions" (dict "mode" "token") }}
{{- end }}
{{- if eq .Values.ray.gcsStorage "redis" }}
{{- $redis := dict "redisAddress" .Values.ray.redis.address }}
{{- with .Values.ray.redis.passwordSecret }}
{{- $reference := dict "secretKeyRef" (dict "name" . "key" $.Values.ray.redis.passwordKey) }}
{{- $_ := set $redis "redisPassword" (dict "valueFrom" $reference) }}
{{- end }}
{{- $_ := set $spec "gcsFaultToleranceOptions" $redis }}
{{- end }}
{{- if .Values.ray.autoscaling.enabled }}
{{- /* Pods follow the rings: idle pods of a drained ring are given back, and a returning ring asks for pods. */}}
{{- $_ := set $spec "enableInTreeAutoscaling" true }}
{{- $_ := set $spec "autoscalerOptions" (dict
    "version" "v2"
    "idleTimeoutSeconds" .Values.ray.autoscaling.idleTimeoutSeconds
    "securityContext" .Values.securityContext
    "env" (list (dict "name" "HOME" "value" "/tmp"))
    "volumeMounts" (list (dict "name" "tmp" "mountPath" "/tmp"))
) }}
{{- end }}
{{- toYaml (mergeOverwrite $spec (omit .Values.ray.spec "headGroupSpec" "workerGroupSpecs")) }}
{{- end }}
