{{/* Refusals of values that contradict each other. The schema cannot see across keys. */}}
{{- define "ringserve.validate" -}}
{{- range $role := list "prefill" "decode" }}
{{- $rings := int (include "ringserve.numRings" (dict "root" $ "role" $role)) }}
{{- if gt $rings 100 }}
{{- fail (printf "%s: its pools have %d rings together; at most 100 have metrics ports" $role $rings) }}
{{- end }}
{{- end }}
{{- range $each := include "ringserve.pools" . | fromJsonArray }}
{{- $role := $each.key }}
{{- $pool := $each.values }}
{{- $cp := int $pool.parallelism.cp }}
{{- $tp := int $pool.parallelism.tp }}
{{- $perPod := int $pool.ranksPerPod }}
{{- if ne 0 (mod (mul $cp $tp) $perPod) }}
{{- fail (printf "%s.ranksPerPod: %d does not divide cp * tp = %d; choose a divisor, so that a ring fills its pods"
    $role $perPod (mul $cp $tp)) }}
{{- end }}
{{- if gt $tp 1 }}
{{- $source := "num_key_value_heads of the model's config.json" }}
{{- $message := printf "model.numKvHeads: required because %s.parallelism.tp is %d; take %s" $role $tp $source }}
{{- $heads := int (required $message $.Values.model.numKvHeads) }}
{{- if ne 0 (mod $heads $tp) }}
{{- fail (printf "%s.parallelism.tp: %d does not divide the model's %d KV heads; choose a divisor" $role $tp $heads) }}
{{- end }}
{{- end }}
{{- if ne 0 (mod $perPod $tp) }}
{{- fail (printf "%s.ranksPerPod: %d is no multiple of tp = %d; the processes that share heads are in one pod"
    $role $perPod $tp) }}
{{- end }}
{{- $gpus := int (index (default dict $pool.resources.limits) "nvidia.com/gpu" | default 0) }}
{{- if and (eq $.Values.model.device "cuda") (ne $gpus $perPod) }}
{{- $message := "%s.resources: limit nvidia.com/gpu is %d; model.device cuda and %d processes in a pod need %d" }}
{{- fail (printf $message $role $gpus $perPod $perPod) }}
{{- end }}
{{- if and (eq $.Values.model.device "cpu") (gt $gpus 0) }}
{{- fail (printf "%s.resources: %d GPUs would be idle, since model.device is cpu; set model.device to cuda"
    $role $gpus) }}
{{- end }}
{{- $nccl := and (eq $.Values.model.device "cuda") (gt (mul $cp $tp) 1) }}
{{- if and $nccl $.Values.internalTls.secretName (not $.Values.internalTls.allowPlainRing) }}
{{- fail "internalTls.allowPlainRing: true is required with model.device cuda, since NCCL does not encrypt" }}
{{- end }}
{{- range $key := list "minReplicas" "maxReplicas" }}
{{- if and (not (kindIs "invalid" (index $pool $key))) (not $.Values.ray.autoscaling.enabled) }}
{{- fail (printf "%s.%s: %d is for Ray's autoscaler, which is off; set ray.autoscaling.enabled or omit it"
    $role $key (int (index $pool $key))) }}
{{- end }}
{{- end }}
{{- if and (not (kindIs "invalid" $pool.minReplicas)) (gt (int $pool.minReplicas) (int $pool.replicas)) }}
{{- fail (printf "%s.minReplicas: %d is more than the %d rings of %s.replicas"
    $role (int $pool.minReplicas) (int $pool.replicas) $role) }}
{{- end }}
{{- if and (not (kindIs "invalid" $pool.maxReplicas)) (lt (int $pool.maxReplicas) (int $pool.replicas)) }}
{{- fail (printf "%s.maxReplicas: %d is less than the %d rings of %s.replicas"
    $role (int $pool.maxReplicas) (int $pool.replicas) $role) }}
{{- end }}
{{- end }}
{{- $nixl := eq .Values.kvTransfer.carrier "nixl" }}
{{- if and $nixl .Values.internalTls.secretName (not .Values.internalTls.allowPlainKv) }}
{{- fail "internalTls.allowPlainKv: true is required with kvTransfer.carrier nixl, since NIXL does not encrypt" }}
{{- end }}
{{- if and (not (hasPrefix "builtin:" .Values.model.path)) (empty .Values.model.volume) }}
{{- fail (printf "model.volume: required because model.path is %s, a directory; name the volume that holds it"
    .Values.model.path) }}
{{- end }}
{{- $path := .Values.model.path }}
{{- if and (not (hasPrefix "builtin:" $path)) (not (hasPrefix .Values.model.mountPath $path)) }}
{{- fail (printf "model.path: %s does not lie under model.mountPath %s" .Values.model.path .Values.model.mountPath) }}
{{- end }}
{{- if gt (add (int .Values.gateway.preStopSeconds) 15) (int .Values.gateway.terminationGracePeriodSeconds) }}
{{- fail (printf "gateway.terminationGracePeriodSeconds: %d leaves turns no time; preStopSeconds %d + 15 is the minimum"
    (int .Values.gateway.terminationGracePeriodSeconds) (int .Values.gateway.preStopSeconds)) }}
{{- end }}
{{- $lacks := list }}
{{- if not .Values.gateway.tls.secretName }}{{- $lacks = append $lacks "gateway.tls.secretName" }}{{- end }}
{{- if not .Values.gateway.tokens.secretName }}{{- $lacks = append $lacks "gateway.tokens.secretName" }}{{- end }}
{{- if and $lacks (not .Values.gateway.insecure) }}
{{- fail (printf "%s: required, since the whole cluster reaches the gateway; or set gateway.insecure: true"
    (join " and " $lacks)) }}
{{- end }}
{{- if and .Values.gateway.tls.clientCertificates (not .Values.gateway.tls.secretName) }}
{{- fail "gateway.tls.clientCertificates: clients show certificates only with gateway.tls.secretName" }}
{{- end }}
{{- if and (not .Values.internalTls.secretName) (not .Values.internalTls.insecure) }}
{{- fail (printf "%s: required, since the cluster reaches router, leaders and ranks; or set internalTls.insecure: true"
    "internalTls.secretName") }}
{{- end }}
{{- if and .Values.internalTls.secretName (not .Values.internalTls.serverName) }}
{{- fail "internalTls.serverName: required with internalTls.secretName, since certificates name no address of a pod" }}
{{- end }}
{{- if and (not .Values.ray.tokenAuthentication) (not .Values.internalTls.insecure) }}
{{- fail "ray.tokenAuthentication: true is required, since Ray runs any peer's code; or set internalTls.insecure" }}
{{- end }}
{{- if and (eq .Values.ray.gcsStorage "volume") (empty .Values.head.journalVolume) }}
{{- fail "ray.gcsStorage: volume is head.journalVolume, which is empty; name a volume, or use redis" }}
{{- end }}
{{- if and (eq .Values.ray.gcsStorage "redis") (not .Values.ray.redis.address) }}
{{- fail "ray.redis.address: required with ray.gcsStorage redis, e.g. redis.serving:6379" }}
{{- end }}
{{- if lt (int .Values.gateway.autoscaling.maxReplicas) (int .Values.gateway.autoscaling.minReplicas) }}
{{- fail (printf "gateway.autoscaling: maxReplicas %d is less than minReplicas %d"
    (int .Values.gateway.autoscaling.maxReplicas) (int .Values.gateway.autoscaling.minReplicas)) }}
{{- end }}
{{- if .Values.gateway.ingress.enabled }}
{{- if not .Values.gateway.ingress.host }}
{{- fail "gateway.ingress.host: required with gateway.ingress.enabled; give the host name that clients call" }}
{{- end }}
{{- if not .Values.gateway.http.enabled }}
{{- fail "gateway.ingress.enabled: an Ingress leads to HTTP, and gateway.http.enabled is false; set one of them" }}
{{- end }}
{{- end }}
{{- end }}
