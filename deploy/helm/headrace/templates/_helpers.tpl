{{- define "headrace.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "headrace.labels" -}}
app.kubernetes.io/name: headrace
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .kind }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end -}}

{{- define "headrace.selector" -}}
app.kubernetes.io/name: headrace
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .kind }}
{{- end -}}

{{- define "headrace.secret" -}}
{{- .Values.secret.existing | default (printf "%s-secrets" (include "headrace.name" .)) -}}
{{- end -}}

{{- define "headrace.claim" -}}
{{- $claim := index .root.Values.storage .volume -}}
{{- $claim.existingClaim | default (printf "%s-%s" (include "headrace.name" .root) .volume) -}}
{{- end -}}

{{/* How many instances a pod has; `devices` is one for each GPU. */}}
{{- define "headrace.instances" -}}
{{- $settings := index .root.Values .kind -}}
{{- $count := $settings.instancesPerPod | default 1 -}}
{{- if eq (toString $count) "devices" -}}
{{- if not $settings.gpus -}}
{{- fail (printf "%s.instancesPerPod: `devices` needs %s.gpus; without GPUs write a number" .kind .kind) -}}
{{- end -}}
{{- $count = $settings.gpus -}}
{{- end -}}
{{- int $count -}}
{{- end -}}

{{- define "headrace.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "headrace.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Of a pod with users' code. Started as root, its entry point makes it user 10001 with these capabilities alone. */}}
{{- define "headrace.usersCodeSecurity" -}}
runAsNonRoot: false
runAsUser: 0
runAsGroup: 0
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL], add: [CHOWN, DAC_OVERRIDE, FOWNER, KILL, SETGID, SETUID, SYS_PTRACE]}
{{- end -}}

{{/* Where a pod goes. */}}
{{- define "headrace.placing" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* What every pod of ours has. It needs no API server, and no variable of another service. */}}
{{- define "headrace.podBasics" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext: {{- include "headrace.podSecurity" . | nindent 2 }}
{{- end -}}

{{- define "headrace.image" -}}
image: "{{ .root.Values.images.prefix }}/{{ .image }}:{{ .root.Values.images.tag }}"
imagePullPolicy: {{ .root.Values.images.pullPolicy }}
{{- end -}}

{{- define "headrace.env" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ include "headrace.text" $value | quote }}
{{- end }}
{{- end -}}

{{/* A value as it was written: Helm reads numbers as floats, of which large ones would be 1e+08. */}}
{{- define "headrace.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) (lt . 1e15) (gt . -1e15) }}{{ printf "%.0f" . }}{{ else }}{{ . }}{{ end -}}
{{- end -}}

{{/* Variables of the coordinator and of every instance. */}}
{{- define "headrace.commonEnv" -}}
- name: HEADRACE_TOKEN_FILE
  value: /secrets/fleet-token
- name: HEADRACE_LOG_LEVEL
  value: {{ .Values.logLevel }}
- name: OMP_WAIT_POLICY
  value: PASSIVE
{{- with .Values.otlp.endpoint }}
- name: HEADRACE_OTLP_ENDPOINT
  value: {{ . }}
{{- end }}
{{- end -}}

{{/* Memory for two versions of a model of `modelGiB`, with a tenth to spare; empty: what the service's values say. */}}
{{- define "headrace.weightsGi" -}}
{{- $model := float64 .root.Values.modelGiB -}}
{{- if and $model (has .kind (list "rollout" "trainer")) }}{{ mulf $model 2.2 | ceil | int }}Gi{{ end -}}
{{- end -}}

{{/*
Memory of a pod for a model of `modelGiB`: its versions, 32 GiB for what is of no model's size and, of trainers, what
lies on the host while rollouts have the GPUs and while a checkpoint is written: 30 bytes a weight, divided over pods.
*/}}
{{- define "headrace.memoryGi" -}}
{{- $model := float64 .root.Values.modelGiB -}}
{{- if and $model (has .kind (list "rollout" "trainer")) -}}
{{- $asleep := ternary (divf (mulf $model 15.0) (max 1 (int .root.Values.trainer.replicas))) 0.0 (eq .kind "trainer") -}}
{{ addf (mulf $model 2.2) $asleep 32.0 | ceil | int }}Gi
{{- end -}}
{{- end -}}

{{/* The pod template of rollout, trainer, reward or simulator. */}}
{{- define "headrace.instancePod" -}}
{{- $root := .root -}}
{{- $kind := .kind -}}
{{- $settings := index $root.Values $kind -}}
{{- $count := int (include "headrace.instances" .) -}}
{{- $devices := ne $kind "reward" -}}
{{- $files := $root.Values.storage.files -}}
metadata:
  labels: {{- include "headrace.labels" . | nindent 4 }}
  {{- with $settings.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "headrace.podBasics" $root | nindent 2 }}
  {{- include "headrace.placing" $settings | nindent 2 }}
  # The supervisor gives a trainer 45 s, another instance 25, and whoever stops it 10 more.
  terminationGracePeriodSeconds: {{ ternary 60 40 (eq $kind "trainer") }}
  containers:
    - name: {{ $kind }}
      {{- include "headrace.image" (dict "root" $root "image" $settings.image) | nindent 6 }}
      {{- $ownUser := and $root.Values.usersCode.ownUser (has $kind (list "reward" "simulator")) }}
      securityContext: {{- include (ternary "headrace.usersCodeSecurity" "headrace.containerSecurity" $ownUser) . | nindent 8 }}
      ports:
        {{- range until $count }}
        - {name: {{ printf "grpc-%d" . }}, containerPort: {{ add 7000 . }}}
        - {name: {{ printf "metrics-%d" . }}, containerPort: {{ add $root.Values.metrics.port . }}}
        {{- end }}
      env:
        {{- include "headrace.commonEnv" $root | nindent 8 }}
        - name: HEADRACE_COORDINATOR
          value: "{{ include "headrace.name" $root }}-coordinator:8471"
        - name: HEADRACE_LISTEN
          value: 0.0.0.0:7000
        - name: HEADRACE_METRICS_PORT
          value: {{ $root.Values.metrics.port | quote }}
        - name: HEADRACE_COUNT
          value: {{ $count | quote }}
        - name: HEADRACE_HOST
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        - name: HEADRACE_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        # A pod's name does not resolve; its address does not change while its processes live.
        - name: HEADRACE_ADVERTISE
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        {{- if $devices }}
        - name: HEADRACE_SHM_DIR
          value: /weights
        - name: XDG_CACHE_HOME
          value: /cache
        - name: VLLM_CACHE_ROOT
          value: /cache/vllm
        - name: TORCHINDUCTOR_CACHE_DIR
          value: /cache/inductor
        - name: TRITON_CACHE_DIR
          value: /cache/triton
        {{- end }}
        {{- if eq $kind "trainer" }}
        - name: HEADRACE_DATA_DIR
          value: /data
        - name: GLOO_SOCKET_IFNAME
          value: {{ $settings.interface | quote }}
        - name: NCCL_SOCKET_IFNAME
          value: "={{ $settings.interface }}"
        {{- end }}
        {{- include "headrace.env" $settings.env | nindent 8 }}
      # Its supervisor restarts a process that ends, and kills one that the coordinator does not hear: no liveness probe.
      startupProbe: {grpc: {port: 7000}, periodSeconds: 5, timeoutSeconds: 5, failureThreshold: 60}
      readinessProbe: {grpc: {port: 7000}, periodSeconds: 10, timeoutSeconds: 5}
      {{- $resources := deepCopy $settings.resources }}
      {{- with include "headrace.memoryGi" (dict "root" $root "kind" $kind) }}
      {{- $resources = mustMergeOverwrite $resources (dict "requests" (dict "memory" .) "limits" (dict "memory" .)) }}
      {{- end }}
      {{- if $settings.gpus }}
      {{- $resources = mustMergeOverwrite $resources (dict "limits" (dict $root.Values.gpu.resource (toString $settings.gpus))) }}
      {{- end }}
      resources: {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        - {name: secrets, mountPath: /secrets, readOnly: true}
        - {name: tmp, mountPath: /tmp}
        {{- if $devices }}
        - {name: shm, mountPath: /dev/shm}
        - {name: weights, mountPath: /weights}
        - {name: cache, mountPath: /cache}
        {{- end }}
        {{- if has $kind (list "rollout" "trainer") }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        {{- if eq $kind "trainer" }}
        - {name: data, mountPath: /data}
        {{- end }}
        {{- if $files.existingClaim }}
        - {name: files, mountPath: {{ $files.mountPath }}, readOnly: true}
        {{- end }}
  volumes:
    - name: secrets
      secret:
        secretName: {{ include "headrace.secret" $root }}
        defaultMode: 0440
        items: [{key: fleet-token, path: fleet-token}]
    - name: tmp
      emptyDir: {sizeLimit: 2Gi}
    {{- if $devices }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $settings.shm }}}
    - name: weights
      {{- if and $root.Values.storage.weights.hostPath (ne $kind "simulator") }}
      hostPath: {path: {{ $root.Values.storage.weights.hostPath }}, type: Directory}
      {{- else }}
      emptyDir: {medium: Memory, sizeLimit: {{ include "headrace.weightsGi" (dict "root" $root "kind" $kind) | default $settings.weights }}}
      {{- end }}
    - name: cache
      {{- if $root.Values.storage.cache.hostPath }}
      hostPath: {path: {{ $root.Values.storage.cache.hostPath }}, type: Directory}
      {{- else }}
      emptyDir: {sizeLimit: {{ $root.Values.storage.cache.size }}}
      {{- end }}
    {{- end }}
    {{- if has $kind (list "rollout" "trainer") }}
    - name: models
      persistentVolumeClaim: {claimName: {{ include "headrace.claim" (dict "root" $root "volume" "models") }}, readOnly: true}
    {{- end }}
    {{- if eq $kind "trainer" }}
    - name: data
      persistentVolumeClaim: {claimName: {{ include "headrace.claim" (dict "root" $root "volume" "data") }}}
    {{- end }}
    {{- if $files.existingClaim }}
    - name: files
      persistentVolumeClaim: {claimName: {{ $files.existingClaim }}, readOnly: true}
    {{- end }}
{{- end -}}
