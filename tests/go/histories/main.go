// Histories judges a history of a cluster: lines of JSON on the standard input, one for each call. It exits with 0 for a linearizable
// history, with 1 for another one, and with 2 when it cannot say.
package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"
)

// patience is how long porcupine may search.
const patience = 2 * time.Minute

// owing is how long the servers may not know that a node has let a volume go. It counts while the host has a session, and for an attached volume the
// controller's host, too. In microseconds.
const owing = int64(30 * time.Second / time.Microsecond)

// controller is the host of the controller.
const controller = "c1"

// A line of a history. Times are microseconds of one clock.
type line struct {
	// take (Claim, Mount), release (Release), unmount, read, or a fault, or rest. joined, left: the host begins or ceases to have a session.
	Call string
	// Who calls, as NODE/CONSUMER. The host that has joined or left.
	Who    string
	Client int
	Volume string
	// Single: the volume has one holder at most.
	Single bool
	// Attaches: the servers have the volume detached after its release was answered.
	Attaches   bool
	Start, End int64
	// Wait is how long a claim may wait in the queue. 0: not at all.
	Wait int64
	// Waiting: the claim was refused at its time, and may have a place in the queue still.
	Waiting bool
	// ok, refused, unknown.
	Outcome string
	// The text that the caller was answered. Empty: the outcome is ok, or there was no answer.
	Error string
	// Holders that a read has seen.
	Holders []string
}

// An operation of the model. A line of a history is one or two of them.
type operation struct {
	call, who, volume, outcome string
	// The number of the line. What is left open changes nothing that a later line has made.
	id     int
	single bool
	// A wait that was refused before its time.
	early   bool
	holders []string
	// What is open begins, or ends. Its effect may come at any time in between. 0: the operation has one moment.
	edge edge
	// The text of a call's error, for a reader.
	text string
}

type edge int

const (
	begins edge = iota + 1
	ends
	// The same, and its volume is not its caller's by it any more.
	undone
)

// A holder in the state of a volume. Owed: its node has let the volume go, and the servers may not know it.
type holder struct {
	who  string
	id   int
	owed bool
}

// A state is what may be: the holders that a volume may have, and the operations that are open. Each open operation may have had its effect, or not yet. A
// search for the moment of each would have no end.
type state struct {
	// At least one, in an order. Each is text.
	may  []string
	open []operation
}

func (s state) equal(other state) bool {
	isSame := func(a, b operation) bool { return a.id == b.id && a.call == b.call }
	return slices.Equal(s.may, other.may) && slices.EqualFunc(s.open, other.open, isSame)
}

// after returns whether an operation is allowed, and the state afterwards.
func (s state) after(o operation) (bool, state) {
	next := state{open: s.open}
	switch o.edge {
	case begins:
		next.open = slices.Clone(s.open)
		next.open = append(next.open, o)
		slices.SortFunc(next.open, func(a, b operation) int {
			return cmp.Or(cmp.Compare(a.id, b.id), strings.Compare(a.call, b.call))
		})
		next.may = slices.Clone(s.may)
	case ends, undone:
		isIt := func(open operation) bool { return open.id == o.id && open.call == o.call }
		next.open = slices.DeleteFunc(slices.Clone(s.open), isIt)
		next.may = slices.DeleteFunc(slices.Clone(s.may), func(holders string) bool {
			isOf := func(h holder) bool { return h.id == o.id }
			return o.edge == undone && slices.ContainsFunc(decode(holders), isOf)
		})
	default:
		for _, holders := range s.may {
			if ok, after := step(holders, o); ok && !slices.Contains(next.may, after) {
				next.may = append(next.may, after)
			}
		}
	}
	for at := 0; at < len(next.may); at++ {
		for _, open := range next.open {
			if ok, after := step(next.may[at], open); ok && !slices.Contains(next.may, after) {
				next.may = append(next.may, after)
			}
		}
	}
	slices.Sort(next.may)
	return len(next.may) > 0, next
}

// Holders are text, for they are compared.
func encode(holders []holder) string {
	slices.SortFunc(holders, func(a, b holder) int { return strings.Compare(a.who, b.who) })
	var text strings.Builder
	for _, h := range holders {
		fmt.Fprintf(&text, "%s %d %t\n", h.who, h.id, h.owed)
	}
	return text.String()
}

func decode(state string) (holders []holder) {
	for text := range strings.Lines(state) {
		parts := strings.Fields(text)
		id, _ := strconv.Atoi(parts[1])
		holders = append(holders, holder{parts[0], id, parts[2] == "true"})
	}
	return holders
}

// step returns whether a volume with these holders allows the operation, and the state afterwards.
func step(before string, o operation) (bool, string) {
	holders := decode(before)
	own := slices.IndexFunc(holders, func(h holder) bool { return h.who == o.who })
	without := func() string { return encode(slices.Delete(holders, own, own+1)) }
	// An outcome that is open may come late: to what its caller made before, and to nothing else.
	isDue := own >= 0 && (o.outcome == "ok" || holders[own].id < o.id)
	switch o.call {
	case "take":
		isOthers := len(holders) > 1 || len(holders) == 1 && own < 0
		isFree := !o.single || !isOthers
		switch {
		case o.outcome == "refused":
			return !o.early && o.single && (isOthers || own >= 0 && holders[own].owed), before
		case !isFree || o.outcome == "unknown" && own >= 0 && !holders[own].owed:
			return o.outcome == "unknown", before
		case own < 0:
			holders = append(holders, holder{})
			own = len(holders) - 1
		}
		holders[own] = holder{o.who, o.id, false}
		return true, encode(holders)
	case "undo":
		if own >= 0 && holders[own].id == o.id {
			return true, without()
		}
	case "release":
		if isDue {
			return true, without()
		}
	case "unmount":
		if isDue {
			holders[own].owed = true
			return true, encode(holders)
		}
	case "accept":
		// It comes after its Unmount.
		if own >= 0 && holders[own].id < o.id {
			isAfter := holders[own].owed
			return isAfter, without()
		}
	case "read":
		names := make([]string, 0, len(holders))
		for _, h := range holders {
			names = append(names, h.who)
		}
		return slices.Equal(names, o.holders), before
	}
	return true, before
}

// rule says what rule an operation breaks that fits nowhere.
func rule(o operation) string {
	switch {
	case o.early:
		return "a wait ends by a grant, or by a refusal at its time"
	case o.call == "take" && o.outcome == "ok":
		return "a claim is granted only if no other one is in its way"
	case o.call == "take":
		return "a claim is refused only if another one is in its way"
	case o.call == "read":
		return "etcd has the holders that callers were granted, and those who owe"
	}
	return "the end of a claim fits in its history"
}

var volumes = porcupine.Model{
	Partition: func(history []porcupine.Operation) (parts [][]porcupine.Operation) {
		of := map[string]int{}
		for _, o := range history {
			volume := o.Input.(operation).volume
			at, ok := of[volume]
			if !ok {
				at = len(parts)
				of[volume], parts = at, append(parts, nil)
			}
			parts[at] = append(parts[at], o)
		}
		return parts
	},
	Init: func() any { return state{may: []string{""}} },
	Step: func(before, input, _ any) (bool, any) {
		ok, after := before.(state).after(input.(operation))
		return ok, after
	},
	Equal:             func(a, b any) bool { return a.(state).equal(b.(state)) },
	DescribeOperation: func(input, _ any) string { return fmt.Sprintf("%+v", input) },
}

// closing returns until when the effect of an open line may come: the end of the next claim that its caller was granted. From then on the
// effect is none. Others: a claim that another caller was granted ends it, too, for the volume has one holder.
func closing(later []line, l line, others bool) int64 {
	for _, next := range later {
		if next.Volume == l.Volume && next.Call == "take" && next.Outcome == "ok" && next.Start > l.End && (others || next.Who == l.Who) {
			return next.End
		}
	}
	return math.MaxInt64
}

// accepted returns until when the servers have to know the end of an answered claim. The claim's host has had a session for long enough then, and for an
// attached volume the controller's host, too. A restore of etcd ends all sessions. At rest the servers know all.
func accepted(events []line, l line) int64 {
	joined := map[string]bool{}
	host, _, _ := strings.Cut(l.Who, "/")
	isRestored, since := true, int64(math.MaxInt64)
	for _, event := range events {
		if due := max(since, l.End); due < math.MaxInt64 && due+owing <= event.Start {
			return due + owing
		}
		switch event.Call {
		case "joined", "left":
			joined[event.Who] = event.Call == "joined"
		case "restore etcd":
			isRestored = false
		case "restored":
			isRestored = true
		case "rest":
			return event.Start
		}
		isHeard := isRestored && joined[host] && (!l.Attaches || joined[controller])
		switch {
		case !isHeard:
			since = math.MaxInt64
		case since == math.MaxInt64:
			since = event.Start
		}
	}
	return math.MaxInt64
}

// isMadeAgain returns whether reads saw the claim of a call before its answer, and then no longer. A claim that was made while its host lost the servers
// ends when the host joins. The host asks again meanwhile, for its caller has no answer yet.
func isMadeAgain(lines []line, take line) bool {
	isDuring := func(l line) bool {
		return l.Call == "read" && l.Outcome == "ok" && l.Volume == take.Volume && l.Start <= take.End && l.End >= take.Start
	}
	seen := int64(math.MaxInt64)
	for _, l := range lines {
		if isDuring(l) && slices.Contains(l.Holders, take.Who) {
			seen = min(seen, l.End)
		}
	}
	return slices.ContainsFunc(lines, func(l line) bool {
		return isDuring(l) && !slices.Contains(l.Holders, take.Who) && l.Start >= seen
	})
}

// A restore of etcd from a backup, up to the time when all nodes have said what they hold, and etcd has it. Meanwhile etcd may lack claims, and may have some that
// have ended. So reads and refusals mean nothing. A granted claim is the only one all the same.
type restore struct{ start, end int64 }

// parse returns the operations of a history. Outcomes that are open have no end. What an Unmount owes has reached the servers in bounded time.
func parse(from io.Reader) ([]porcupine.Operation, error) {
	var lines []line
	scanner := bufio.NewScanner(from)
	var restores []restore
	var events []line
	for scanner.Scan() {
		var l line
		if err := json.Unmarshal(scanner.Bytes(), &l); err != nil {
			return nil, fmt.Errorf("line %d: %w", len(lines)+1, err)
		}
		switch l.Call {
		case "rest", "joined", "left", "restore etcd", "restored":
			events = append(events, l)
		}
		switch l.Call {
		case "restore etcd":
			restores = append(restores, restore{l.Start, math.MaxInt64})
		case "restored":
			if len(restores) == 0 {
				return nil, fmt.Errorf("line %d: the end of no restore", len(lines)+1)
			}
			restores[len(restores)-1].end = l.Start
		}
		lines = append(lines, l)
	}
	slices.SortStableFunc(events, func(a, b line) int { return cmp.Compare(a.Start, b.Start) })
	// The callers of a shared volume are in no other's way. Each of them is judged as a part of its own, or the search has no end.
	shared := map[string][]string{}
	for _, l := range lines {
		if l.Call == "take" && !l.Single && !slices.Contains(shared[l.Volume], l.Who) {
			shared[l.Volume] = append(shared[l.Volume], l.Who)
		}
	}
	var operations []porcupine.Operation
	for at, l := range lines {
		if l.Volume == "" {
			continue
		}
		isRestore := func(r restore) bool { return l.Start <= r.end && l.End >= r.start }
		isMeaningless := (l.Call == "read" || l.Outcome == "refused") && slices.ContainsFunc(restores, isRestore)
		if isMeaningless && l.Wait == 0 {
			continue
		}
		if l.Call == "release" && l.Attaches {
			// Its claim is in others' way until the volume is detached.
			l.Call = "unmount"
		}
		if !slices.Contains([]string{"ok", "refused", "unknown"}, l.Outcome) ||
			!slices.Contains([]string{"take", "release", "unmount", "read"}, l.Call) {
			return nil, fmt.Errorf("line %d: call %q, outcome %q", at+1, l.Call, l.Outcome)
		}
		slices.Sort(l.Holders)
		isTake := l.Call == "take"
		isEarly := isTake && l.Outcome == "refused" && l.End < l.Start+l.Wait
		id, outcome, last := at+1, l.Outcome, ends
		add := func(call string, start, end int64) {
			part := func(volume string, holders []string) {
				o := operation{call, l.Who, volume, outcome, id, l.Single, isEarly, holders, 0, l.Error}
				from, until := start, end
				if outcome == "unknown" {
					// Both moments are those of the history.
					o.edge, until = begins, start
					if end < math.MaxInt64 {
						o := o
						o.edge = last
						operations = append(operations, porcupine.Operation{ClientId: l.Client, Input: o, Call: end, Return: end})
					}
				}
				operations = append(operations, porcupine.Operation{ClientId: l.Client, Input: o, Call: from, Return: until})
			}
			whos := shared[l.Volume]
			if call != "read" && len(whos) > 0 {
				whos = []string{l.Who}
			}
			for _, who := range whos {
				isOther := func(holder string) bool { return holder != who }
				part(l.Volume+" of "+who, slices.DeleteFunc(slices.Clone(l.Holders), isOther))
			}
			if len(whos) == 0 {
				part(l.Volume, l.Holders)
			}
		}
		isWait := isTake && l.Wait > 0 && l.Outcome != "unknown"
		if isWait || isTake && l.Outcome == "ok" && isMadeAgain(lines, l) {
			// A claim that waits is in others' way, as one that is granted. The claim that ends has a number of its own.
			until := l.End
			if l.Outcome == "refused" {
				last = undone
			}
			if l.Waiting || isMeaningless {
				// The caller was answered before the servers know that it waits no longer. A backup may have its place, too.
				until = max(l.End, min(accepted(events, l), closing(lines[at+1:], l, false)))
			}
			id, outcome = -id, "unknown"
			add("take", l.Start, until)
			add("undo", l.Start, until)
			id, outcome, last = at+1, l.Outcome, ends
		}
		if isMeaningless {
			// What the call has waited for was in others' way all the same.
			continue
		}
		start, end := l.Start, l.End
		if isTake && l.Outcome == "refused" && !isEarly && !l.Waiting {
			// The servers have refused it when its time was over.
			start += l.Wait
		}
		if l.Outcome == "unknown" {
			end = closing(lines[at+1:], l, false)
		}
		switch {
		case l.Call == "read" && l.Outcome != "ok":
			continue
		case l.Call == "take" && l.Outcome == "unknown":
			add("undo", l.Start, end)
		case l.Call == "unmount" && l.Outcome == "unknown":
			add("accept", l.Start, end)
		case l.Call == "unmount":
			due := min(accepted(events, l), closing(lines[at+1:], l, l.Single))
			add("accept", l.Start, max(due, l.End))
		}
		add(l.Call, start, end)
	}
	return spread(operations), scanner.Err()
}

// nanoseconds of a microsecond.
const nanoseconds = int64(time.Microsecond)

// spread returns the operations with nanoseconds as their times, and gives each edge a moment of its own. What is open begins before all else of its
// microsecond, and ends after it. Edges of one moment have no order, and porcupine would try each order of them.
func spread(operations []porcupine.Operation) []porcupine.Operation {
	edges := map[int64]int64{}
	for at := range operations {
		o := &operations[at]
		edge := o.Input.(operation).edge
		o.Call *= nanoseconds
		if o.Return < math.MaxInt64 {
			o.Return *= nanoseconds
		}
		if edge == 0 {
			continue
		}
		moment := o.Call
		if edge == begins {
			moment -= nanoseconds - 1
		}
		edges[moment]++
		o.Call = moment + edges[moment]
		o.Return = o.Call
	}
	return operations
}

// shown is how many operations are printed before and after the place where no order goes on.
const shown = 8

// obstacle says what rule is broken, and where the longest order of a volume's operations ends: its last operations, the state after them, and
// the first ones that are left.
func obstacle(part []porcupine.Operation, orders [][]porcupine.Operation) string {
	var longest []porcupine.Operation
	for _, order := range orders {
		if len(order) > len(longest) {
			longest = order
		}
	}
	var text strings.Builder
	describe := func(o porcupine.Operation) {
		fmt.Fprintf(&text, "  client %d, %d to %d: %+v\n", o.ClientId, o.Call/nanoseconds, o.Return/nanoseconds, o.Input)
	}
	last := volumes.Init()
	for _, o := range longest {
		_, last = volumes.Step(last, o.Input, o.Output)
	}
	isIn := func(o porcupine.Operation) bool {
		return slices.ContainsFunc(longest, func(in porcupine.Operation) bool { return reflect.DeepEqual(in, o) })
	}
	left := slices.DeleteFunc(slices.Clone(part), isIn)
	slices.SortFunc(left, func(a, b porcupine.Operation) int { return cmp.Compare(a.Call, b.Call) })
	if len(left) > 0 {
		// No order goes on past the first end of an operation that is left.
		first := slices.MinFunc(left, func(a, b porcupine.Operation) int { return cmp.Compare(a.Return, b.Return) })
		fmt.Fprintf(&text, "rule: %s\n broken by:\n", rule(first.Input.(operation)))
		describe(first)
	}
	text.WriteString(" in order:\n")
	for _, o := range longest[max(0, len(longest)-shown):] {
		describe(o)
	}
	fmt.Fprintf(&text, " holders then: %q\n left:\n", strings.Join(last.(state).may, "or "))
	for _, o := range left[:min(shown, len(left))] {
		describe(o)
	}
	return text.String()
}

func main() {
	operations, err := parse(os.Stdin)
	if err != nil || len(operations) == 0 {
		fmt.Fprintf(os.Stderr, "histories: %d operations, %v\n", len(operations), err)
		os.Exit(2)
	}
	result := porcupine.CheckOperationsTimeout(volumes, operations, patience)
	fmt.Printf("porcupine: %s, %d operations\n", result, len(operations))
	if result == porcupine.Ok {
		return
	}
	// All parts had their time together. A part may need all of it.
	failed := false
	for _, part := range volumes.Partition(operations) {
		result, info := porcupine.CheckOperationsVerbose(volumes, part, patience)
		if result == porcupine.Ok {
			continue
		}
		failed = true
		what := "not linearizable"
		if result == porcupine.Unknown {
			what = fmt.Sprintf("not decided within %s", patience)
		}
		orders := slices.Concat(info.PartialLinearizationsOperations()...)
		fmt.Printf("%s: %s\n%s", what, part[0].Input.(operation).volume, obstacle(part, orders))
	}
	if failed {
		os.Exit(1)
	}
	fmt.Println("each volume alone: Ok")
}
