package csi

// Event is something that happened in csid, or a gap.
type Event struct {
	// Cursor is where to continue after this event was handled: see Client.Events.
	Cursor string
	// Gap says that events were lost before this point, or csid has a new journal: list the objects again. Only Cursor is set too.
	Gap bool

	// Sequence is the number of the event in csid's journal.
	Sequence uint64
	// Realtime is when it happened, in microseconds since 1970.
	Realtime uint64
	// Type is mount, unmount, plugin-health or another that org.csid1.xml lists. More may come.
	Type string
	// Subject is a plugin's ID, NAMESPACE/VOLUME, an operation's ID, or empty.
	Subject string

	// Success, Error, Consumer, Tag, Plugin, UID, From and To are the details, as far as they apply to the type.
	Success               bool
	Error                 string
	Consumer, Tag, Plugin string
	UID                   uint32
	From, To              string
}
