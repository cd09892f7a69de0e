{{- define "labels" -}}
app.kubernetes.io/part-of: gazette
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "etcd.address" -}}
{{- if .Values.etcd.address }}{{ .Values.etcd.address }}
{{- else if .Values.etcd.enabled }}http://etcd-0.etcd:2379,http://etcd-1.etcd:2379,http://etcd-2.etcd:2379
{{- else }}{{ fail "give etcd.address, or enable etcd" }}
{{- end }}
{{- end }}

{{- define "brokers.address" -}}
{{- if .Values.brokers.address }}{{ .Values.brokers.address }}
{{- else if .Values.brokers.enabled }}http://gazette:8080
{{- else }}{{ fail "give brokers.address, or enable brokers" }}
{{- end }}
{{- end }}

{{- /* Labels of the pods of a Deployment, by its name. */}}
{{- define "selector" -}}
app.kubernetes.io/name: {{ . }}
{{- end }}

{{- define "strategy" -}}
rollingUpdate:
  maxSurge: 1
  maxUnavailable: 0
{{- end }}

{{- define "annotations" -}}
prometheus.io/scrape: "true"
prometheus.io/port: "8081"
checksum/zone: {{ .Values.zoneScript | sha256sum }}
{{- if .Values.oidc.issuer }}
# Processes read the file of roles at their start.
checksum/oidc: {{ .Values.oidc | toYaml | sha256sum }}
{{- end }}
{{- end }}

{{- define "spread" -}}
{{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
- maxSkew: 1
  topologyKey: {{ . }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "selector" $ | nindent 6 }}
{{- end }}
{{- end }}

{{- define "node" -}}
- name: NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
# Empty before Kubernetes 1.35, and where the node has no such label.
- name: NODE_ZONE
  valueFrom:
    fieldRef:
      fieldPath: metadata.labels['topology.kubernetes.io/zone']
{{- end }}

{{- define "keys" -}}
valueFrom:
  secretKeyRef:
    name: {{ . }}
    key: keys
{{- end }}

{{- /* Settings of the provider of tokens: a list of the context and the prefix of variables. */}}
{{- define "oidc" }}
{{- $prefix := last . }}
{{- with (first .).Values.oidc }}
- name: {{ $prefix }}_OIDC_ISSUER
  value: {{ .issuer | quote }}
- name: {{ $prefix }}_OIDC_AUDIENCE
  value: {{ required "oidc.issuer needs oidc.audience" .audience | quote }}
- name: {{ $prefix }}_OIDC_CLAIM
  value: {{ .claim | quote }}
- name: {{ $prefix }}_OIDC_ROLES
  value: /roles/roles.yaml
{{- end }}
{{- end }}

{{- /* The file of roles: a list of the context, the name of the Deployment and its rows. */}}
{{- define "roles" }}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ index . 1 }}-roles
  labels:
    {{- include "labels" (first .) | nindent 4 }}
data:
  roles.yaml: |
    {{- dict "roles" (last .) | toYaml | nindent 4 }}
{{- end }}

{{- define "ports" -}}
- name: grpc
  containerPort: 8080
- name: http
  containerPort: 8081
{{- end }}

{{- define "probes" -}}
startupProbe:
  httpGet:
    path: /metrics
    port: http
  periodSeconds: 2
  failureThreshold: 60
readinessProbe:
  httpGet:
    path: /debug/ready
    port: http
  periodSeconds: 5
# Not /debug/ready, which says no while a member waits for etcd, or drains.
livenessProbe:
  httpGet:
    path: /metrics
    port: http
  periodSeconds: 30
  timeoutSeconds: 10
  failureThreshold: 6
{{- end }}

{{- /* The probe of a console, which listens on loopback. */}}
{{- define "console.ask" -}}
command:
  - python
  - -c
  - import urllib.request; urllib.request.urlopen('http://127.0.0.1:8090/debug/ready', timeout=4)
{{- end }}

{{- define "pull" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* The Service, the disruption budget and the zones of members: a list of the context and their name. */}}
{{- define "around" }}
{{- $name := last . }}
{{- with first . }}
apiVersion: v1
kind: Service
metadata:
  name: {{ $name }}
  labels:
    {{- include "labels" . | nindent 4 }}
spec:
  selector:
    {{- include "selector" $name | nindent 4 }}
  ports:
    - name: grpc
      port: 8080
    - name: http
      port: 8081
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ $name }}
  labels:
    {{- include "labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- include "selector" $name | nindent 6 }}
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ $name }}-zonemap
  labels:
    {{- include "labels" . | nindent 4 }}
data:
  node-zone.sh: |
    {{- .Values.zoneScript | nindent 4 }}
{{- end }}
{{- end }}
