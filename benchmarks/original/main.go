// Program gazette-bench runs the client and the consumer framework of the Go original, as load for `gazette bench`.
//
//	gazette-bench publish …   publishes messages, and prints how long that took
//	gazette-bench serve …     runs a consumer that counts words
package main

import (
	"os"
	"syscall"

	"go.gazette.dev/core/mainboilerplate/runconsumer"
)

func main() {
	endWithParent()
	if len(os.Args) > 1 && os.Args[1] == "publish" {
		publish(os.Args[2:])
		return
	}
	runconsumer.Main(new(counter))
}

// endWithParent asks the kernel for SIGTERM when the benchmark that started this process ends, in any way.
func endWithParent() {
	var _, _, code = syscall.RawSyscall(
		syscall.SYS_PRCTL, syscall.PR_SET_PDEATHSIG, uintptr(syscall.SIGTERM), 0)
	if code != 0 {
		must(code)
	}
}
