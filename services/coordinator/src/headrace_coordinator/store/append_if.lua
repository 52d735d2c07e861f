-- The only write of the event log: appends if the writer's epoch is the active one and the log ends where it says.
-- KEYS: meta, log
-- ARGV: epoch, expected, first, then the entries' payloads
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if epoch ~= ARGV[1] then
  return redis.error_reply('FENCED the active coordinator epoch is ' .. tostring(epoch))
end
local count = #ARGV - 3
local last = string.format('%d', tonumber(ARGV[3]) + count - 1)
local sequence = redis.call('HGET', KEYS[1], 'sequence') or '0'
if sequence ~= ARGV[2] then
  if sequence == last and redis.call('HGET', KEYS[1], 'first') == ARGV[3] then
    return 'REPEATED'
  end
  return redis.error_reply('FENCED the log ends at ' .. sequence .. ', not at ' .. ARGV[2])
end
for index = 1, count do
  local id = string.format('%d-0', tonumber(ARGV[3]) + index - 1)
  redis.call('XADD', KEYS[2], id, 'e', ARGV[3 + index])
end
redis.call('HSET', KEYS[1], 'sequence', last, 'first', ARGV[3])
return 'APPENDED'
