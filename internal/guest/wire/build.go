package wire

// Methods of a machine in which an image is built step by step.
const (
	MethodEndProcesses = "agent.EndProcesses" // ends what a step left running
	MethodConfigure    = "agent.Configure"    // reads the image's defaults again
)

// FeatureSteps in Hello's features says that the agent knows these methods, and KeepDirs of ExtractRequest.
const FeatureSteps = "steps"

// EndProcessesRequest kills all processes that were started through the agent, and their descendants, but those in Keep and
// theirs. With List nothing is killed.
type EndProcessesRequest struct {
	Keep []int `json:"keep,omitempty"`
	List bool  `json:"list,omitempty"`
}

// EndProcessesReply has what is left, with List what there is.
type EndProcessesReply struct {
	PIDs []int `json:"pids"`
}
