module gazette-bench

go 1.25.0

require go.gazette.dev/core v0.103.0
